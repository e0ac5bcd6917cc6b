"""Redirects the output of C++ code to standard error; for the command line: a user's process keeps its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def keep_python_stderr() -> None:
    """Gives Python's `sys.stderr` another descriptor, so that it stays on the console when 2 is redirected."""
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


@contextmanager
def native_log(path: Path) -> Iterator[None]:
    """Lets file descriptor 2 write to `path`: TensorFlow and gRPC ignore log levels for some messages."""
    console = os.dup(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)
