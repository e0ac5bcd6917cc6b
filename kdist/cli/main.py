"""`kdist COMMAND`, and the same as `python -m kdist COMMAND`; without a command, `train`.

Every error becomes one message and an exit code.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from kdist import forks, log
from kdist.config.environment import as_written
from kdist.config.suggestions import did_you_mean
from kdist.errors import ConfigError, KdistError
from kdist.fit import signals

#: The attribute of an error that names the log with its full traceback.
LOG_FILE = "kdist_log_file"
#: When the command began, of `time.monotonic`.
BEGAN = time.monotonic()


class Command(NamedTuple):
    """A subcommand: the module whose `run` takes its arguments and returns the exit code, and its line of `--help`."""

    module: str
    usage: str
    summary: str


COMMANDS = {
    "train": Command("kdist.cli.train", "+recipe=mnist cluster=2ps2w", "trains; `train` may be left out"),
    "evaluate": Command("kdist.cli.evaluate", "RUN_DIR", "loss and metrics of a checkpoint"),
    "predict": Command("kdist.cli.predict", "RUN_DIR --input F --output F", "outputs for the rows of a file"),
    "export": Command("kdist.cli.export", "RUN_DIR --to DIR", "a SavedModel for serving"),
    "resize": Command("kdist.cli.resize", "RUN_DIR workers=4", "more or fewer tasks for a run that is training"),
    "runs": Command("kdist.sweeps.command", "FOLDER", "all runs below a folder, compared"),
    "launch": Command("kdist.extras.ssh.command", "-H h1:2,h2:2 -- ...", "trains on other machines, over ssh"),
}


def main(command: str | None = None) -> NoReturn:
    """Runs the command line, or one command with its arguments, and ends the process with its exit code."""
    # As `python -m` does: a config may name a module in the current folder.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    if sys.stderr is not None:
        sys.stderr.flush()
    # Also when descriptor 2 is redirected, see `native_log`.
    log.stand_in_for_console()
    signals.stop_before_training()
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    code = run([*([] if command is None else [command]), *sys.argv[1:]])
    _flush_and_end_children()
    # At a normal exit TensorFlow may wait forever for a task that has exited. Everything is written and closed by now.
    os._exit(code)


def start_anew() -> NoReturn:
    """Replaces this process by one with the same command, id and parent, of which nothing is left."""
    _flush_and_end_children()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _flush_and_end_children() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    forks.end_daemons()


def run(arguments: list[str]) -> int:
    """Runs the command line `arguments`; returns the exit code."""

    def command() -> int:
        name, rest = _split(arguments)
        return int(importlib.import_module(COMMANDS[name].module).run(rest))

    return exit_code_of(command)


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The name of the command, and its arguments."""
    first = arguments[0] if arguments else ""
    if first in COMMANDS:
        return first, arguments[1:]
    if not re.fullmatch(r"[A-Za-z][\w-]*", first):
        return "train", arguments
    otherwise = f"choose one of {', '.join(COMMANDS)}, or give KEY=VALUE to train"
    raise ConfigError(f"{first}: there is no such command; {did_you_mean(first, COMMANDS) or otherwise}")


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs a command; prints the error that ends it, and returns the exit code."""
    try:
        return command() or 0
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it becomes a message and an exit code
        error = signals.requested_exit() or caught
    if isinstance(error, KeyboardInterrupt):
        if not signals.said.is_set():
            _say("kdist: interrupted")
        return signals.INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code == signals.STOPPED and not signals.said.is_set():
            _say("kdist: terminated")
        return error.code if isinstance(error.code, int) else 1
    print_error(error)
    return error.exit_code if isinstance(error, KdistError) else 1


def print_error(error: BaseException) -> None:
    """Prints one message, and the lines of the user's own code that led to it, or else the one that has failed."""
    log_file = getattr(error, LOG_FILE, None)
    where = "" if log_file is None else f"\n  full traceback: {log_file}"
    if isinstance(error, KdistError):
        _say(f"kdist: error: {error}{where}")
        return
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    ours = (str(Path(__file__).parents[1]), f"{os.sep}site-packages{os.sep}", "<frozen", f"{os.sep}lib{os.sep}python")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in ours)]
    parts = [f"kdist: error: chief: {message}\n", *traceback.format_list(own or frames[-1:])]
    _say("".join(parts).rstrip("\n") + where)


def _say(message: str) -> None:
    log.say(log.Line(as_written(message), "error"), logging.ERROR, sys.stderr)


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
