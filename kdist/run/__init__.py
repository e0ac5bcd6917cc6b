"""The files of a run dir: checkpoints, summaries, metrics, the result.

Every file is complete or absent, because it is written under another name first. Only the chief writes.
"""
