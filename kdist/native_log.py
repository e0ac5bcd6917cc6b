"""Sends what TensorFlow's C++ code writes to standard error into a log file, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def native_log(path: Path) -> Iterator[None]:
    """Within it, file descriptor 2 is `path`, while Python's own `sys.stderr` still goes where it went.

    C++ code knows only the descriptor. TensorFlow and gRPC write there what no log level of theirs holds back.
    """
    sys.stderr.flush()
    console = os.dup(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    os.close(log)
    python_stderr = sys.stderr
    # Where Python wrote to the descriptor itself (no notebook, no capture), it goes on to the console.
    stream = os.fdopen(os.dup(console), "w", buffering=1) if _writes_to_descriptor_2(python_stderr) else None
    if stream is not None:
        sys.stderr = stream
    try:
        yield
    finally:
        if stream is not None:
            stream.flush()
            sys.stderr = python_stderr
            stream.close()
        os.dup2(console, 2)
        os.close(console)


def _writes_to_descriptor_2(stream: object) -> bool:
    try:
        return stream.fileno() == 2  # type: ignore[attr-defined]
    except (OSError, AttributeError, ValueError):
        return False
