"""What a run leaves in its run dir: checkpoints, summaries, the result, the lock.

Every file is complete or absent, because it is written under another name first. Only the chief writes.
"""
