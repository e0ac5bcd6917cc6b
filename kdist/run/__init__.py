"""What a run leaves in its run dir: checkpoints, summaries, the result, the lock.

Every file is complete or absent, and only the chief writes.
"""
