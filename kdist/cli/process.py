"""The process of a command: every error becomes one message and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from kdist import forks, log
from kdist.errors import KdistError
from kdist.fit import signals


def end_process(run: Callable[[list[str]], int]) -> NoReturn:
    """Runs a command with the arguments of this process, and ends it with the exit code that `run` returns."""
    # As `python -m` does: a config may name a module in the current folder.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    # It stays on the console when descriptor 2 is redirected, see `native_log`.
    sys.stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    signals.stop_before_training()
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    code = run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    forks.end_daemons()
    # At a normal exit TensorFlow may wait forever for a task that has exited. Everything is written and closed by now.
    os._exit(code)


@contextmanager
def native_log(path: Path) -> Iterator[None]:
    """Lets C++ code write its standard error to `path`: TensorFlow and gRPC ignore log levels for some messages."""
    console = os.dup(2)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)


def start_anew() -> NoReturn:
    """Replaces this process by one with the same command, id and parent, of which nothing is left."""
    sys.stdout.flush()
    sys.stderr.flush()
    forks.end_daemons()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs a command; prints the error that ends it, and returns the exit code."""
    try:
        return command() or 0
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it becomes a message and an exit code
        error = signals.asked_to_exit() or caught
    if isinstance(error, KeyboardInterrupt):
        _say("kdist: interrupted")
        return signals.INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code == signals.STOPPED:
            _say("kdist: terminated")
        return error.code if isinstance(error.code, int) else 1
    print_error(error)
    return error.exit_code if isinstance(error, KdistError) else 1


def print_error(error: BaseException) -> None:
    """Prints one message, and the lines of the user's own code that led to it, or else the one that has failed."""
    if isinstance(error, KdistError):
        _say(f"kdist: error: {error}")
        return
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    ours = (str(Path(__file__).parents[1]), f"{os.sep}site-packages{os.sep}", "<frozen", f"{os.sep}lib{os.sep}python")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in ours)]
    _say("".join([f"kdist: error: chief: {message}\n", *traceback.format_list(own or frames[-1:])]).rstrip("\n"))


def _say(message: str) -> None:
    log.say(log.Line(message, "error"), logging.ERROR, sys.stderr)
