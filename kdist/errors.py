"""The errors of kdist: each is one message that says what is wrong, where, and how to mend it.

On the command line an error becomes that message and its `exit_code`; in Python it is raised.
"""

from __future__ import annotations


class KdistError(Exception):
    """The run failed (exit code 1). Base of every error that kdist raises itself."""

    exit_code = 1


class ConfigError(KdistError):
    """What was asked for cannot be done: a wrong key, value, model or data description (exit code 2)."""

    exit_code = 2


class ClusterError(KdistError):
    """A task of the cluster did not start, died or stopped answering (exit code 75: a retry may help)."""

    exit_code = 75


class TaskError(KdistError):
    """The user's model or data failed while a task ran it.

    Args:
        task: the task it came from, as `worker:1` or `chief`.
        cause: the user's error as TensorFlow or Python reported it.
    """

    def __init__(self, task: str, cause: BaseException) -> None:
        self.task = task
        self.cause = cause
        super().__init__(f"{task}: {type(cause).__name__}: {_first_lines(cause)}")


class CheckpointError(KdistError):
    """A checkpoint cannot be written, is damaged, or does not fit the model."""


class NonFiniteError(KdistError):
    """The loss or a parameter became NaN or infinite."""


def _first_lines(error: BaseException, limit: int = 600) -> str:
    """The message of `error` without TensorFlow's graph trace, at most `limit` characters."""
    text = getattr(error, "message", None) or str(error) or "(no message)"
    for marker in ("\n\nStack trace", "\nStack trace", "Detected at node", "\n\t [[", "\n\nOriginal stack trace"):
        head, found, tail = text.partition(marker)
        if found:
            # TensorFlow puts the reason after the trace of the node that failed.
            text = head.strip() or tail.strip().splitlines()[-1]
    return text.strip()[:limit]
