"""`kdist COMMAND`, and the same as `python -m kdist COMMAND`; without a command, `train`."""

from __future__ import annotations

import difflib
import importlib
import re
from typing import NamedTuple, NoReturn

from kdist.cli.process import end_process, exit_code_of
from kdist.errors import ConfigError


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        module: the module whose `run` takes its arguments and returns the exit code.
        usage: an example of its arguments.
        summary: its work, in a line of `kdist --help`.
    """

    module: str
    usage: str
    summary: str


COMMANDS = {
    "train": Command("kdist.cli.train", "+recipe=mnist cluster=2ps2w", "trains; `train` may be left out"),
    "evaluate": Command("kdist.cli.evaluate", "RUN_DIR", "loss and metrics of a checkpoint"),
    "predict": Command("kdist.cli.predict", "RUN_DIR --input F --output F", "outputs for the rows of a file"),
    "export": Command("kdist.cli.export", "RUN_DIR --to DIR", "a SavedModel for serving"),
    "runs": Command("kdist.sweeps.command", "FOLDER", "all runs below a folder, compared"),
    "launch": Command("kdist.extras.ssh.command", "-H h1:2,h2:2 -- ...", "trains on other machines, over ssh"),
}


def main(command: str | None = None) -> NoReturn:
    """Runs the command line, or one command with its arguments, and ends the process with its exit code."""
    end_process(lambda arguments: run(arguments if command is None else [command, *arguments]))


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
    near = difflib.get_close_matches(first, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}, or give KEY=VALUE to train"
    raise ConfigError(f"{first}: there is no such command; {hint}")
