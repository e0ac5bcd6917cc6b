"""The errors of kdist: each message names the key or task, the value, and a way out.

On the command line an error becomes that message and its `exit_code`; in Python it is raised.
"""

from __future__ import annotations

import re
import shlex
import traceback
from contextlib import suppress
from importlib import metadata
from typing import Any

from kdist.log import plain_text

# Lines that say where in a graph an error happened; the reason comes before or after them.
_TRACE = re.compile(r'Graph execution error:|Detected at node|<stack traces|\s+File "|\s+\[\[')
# The first of several errors of one call.
_FIRST_ROOT = re.compile(r"root error\(s\) found\.\s*\(0\) \w+:\s*(.*?)\s*(?:\(1\) \w+:|\d+ successful|\Z)", re.DOTALL)
_FUNCTION_NODE = re.compile(r"\{\{function_node \S+\}\}\s*")
# The place of an error in a dataset, and the form in which TensorFlow shows the message of an assertion.
_DATASET = re.compile(r"Error in user-defined function passed to \S+ transformation with iterator: \S+: ")
_ASSERTION = re.compile(r"assertion failed: \[(.*)\]")


def install_command(extra: str) -> str:
    """`pip install 'pyarrow>=16'`, the packages of an extra of kdist: its own name is on no index that pip looks at."""
    needs = []
    with suppress(metadata.PackageNotFoundError):
        parts = [line.partition(";") for line in metadata.requires("kdist") or ()]
        needs = [shlex.quote(package.strip()) for package, _, marker in parts if f'extra == "{extra}"' in marker]
    return f"pip install {' '.join(needs) or f'the packages of the extra {extra}'}"


class KdistError(Exception):
    """The run failed (exit code 1). Base of every error that kdist raises itself."""

    exit_code = 1

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(plain_text(item) if isinstance(item, str) else item for item in arguments))


class ConfigError(KdistError):
    """The request is invalid: a wrong key, value, model or data description (exit code 2)."""

    exit_code = 2


class ClusterError(KdistError):
    """A task of the cluster did not start, died or stopped responding (exit code 75: a retry may help)."""

    exit_code = 75


class ChiefStoppedError(ClusterError):
    """The chief was stopped before the end of the run; a task that got the signal, too, exits with code 143."""

    exit_code = 143


class DataSourceError(KdistError):
    """Data that keeps arriving could not be reached for too long (exit code 75: a retry may help)."""

    exit_code = 75


class ResizeError(KdistError):
    """A cluster was not resized; training continues on it as before."""

    exit_code = 75


class NoWorkersError(KdistError):
    """Too many workers have left, and no others have joined in time (exit code 75); the last step is saved."""

    exit_code = 75


class TornUpdateError(ClusterError):
    """A worker was lost in the middle of an update that only some servers have applied; the servers are running."""


class TaskError(KdistError):
    """The user's model or data failed while a task ran it.

    Args:
        task: the task that failed, for example `worker:1` or `chief`.
        cause: the user's error as TensorFlow or Python reported it.
        where: the place of the failure, in the model or the data.
    """

    def __init__(self, task: str, cause: BaseException, where: str | None = None) -> None:
        self.task = task
        self.cause = cause
        super().__init__(": ".join(filter(None, (task, where, type(cause).__name__, reason(cause)))))

    def __reduce__(self) -> Any:
        # Other processes may not know the class of the cause.
        return _received_task_error, (self.task, str(self))


def _received_task_error(task: str, message: str) -> TaskError:
    error = TaskError.__new__(TaskError)
    error.task, error.cause = task, RuntimeError(message)
    KdistError.__init__(error, message)
    return error


class CheckpointError(KdistError):
    """A checkpoint cannot be written, is damaged, or does not fit the model."""


class NonFiniteError(KdistError):
    """The loss or a parameter became NaN or infinite."""


def reason(error: BaseException) -> str:
    """The message of `error` without TensorFlow's graph trace and additions of gRPC, at most 600 characters."""
    text = getattr(error, "message", None) or str(error)
    text = text.partition("\nAdditional GRPC error information")[0]
    if first := _FIRST_ROOT.search(text):
        text = first[1]
    text = _ASSERTION.sub(r"\1", _DATASET.sub("", text))
    lines = [_FUNCTION_NODE.sub("", line) for line in text.splitlines() if line.strip() and not _TRACE.match(line)]
    return "\n".join(lines)[:600] or "(no message)"


def traceback_of(error: BaseException) -> str:
    """The traceback of an error, for a log."""
    return plain_text("".join(traceback.format_exception(error)))
