"""Scalers: they start and end tasks on the word of `+hooks=autoscale`."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from typing import Protocol

from kdist.cluster.spec import ClusterShape
from kdist.errors import ClusterError, ConfigError

_COMMAND_SECS = 60.0
#: What `cluster.scaler` may be, beside a command.
AUTO, LOCAL, NONE = "auto", "local", "none"


class Scaler(Protocol):
    """Gives a cluster another shape, or asks somebody else to do so."""

    def scale(self, shape: ClusterShape, why: str) -> None:
        """Returns at once, or when a command has; the tasks join and leave later."""


class LocalScaler:
    """Lets the chief start and end processes; `resize` is that of the session."""

    def __init__(self, resize: Callable[..., object]) -> None:
        self._resize = resize

    def scale(self, shape: ClusterShape, why: str) -> None:
        self._resize(workers=shape.num_workers, ps=shape.num_ps or None, why=why)


class CommandScaler:
    """Runs a command, in which `{workers}` and `{ps}` are the wanted numbers of tasks.

    Tasks that it starts ask the chief for a place; tasks that it ends get SIGTERM, and leave.

    Raises:
        ConfigError: the command cannot be read.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        try:
            if not self._words(ClusterShape(1, 1)):
                raise ValueError("is empty")
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            why = f"{{{error.args[0]}}} is not known" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"cluster.scaler={command}: {why}; give local, none, auto, or a command with {{workers}} and {{ps}}, "
                "and {{ and }} for other braces"
            ) from None

    def _words(self, shape: ClusterShape) -> list[str]:
        return [word.format(workers=shape.num_workers, ps=shape.num_ps) for word in shlex.split(self._command)]

    def scale(self, shape: ClusterShape, why: str) -> None:
        """Raises `ClusterError` if the command fails, or takes longer than a minute."""
        words = self._words(shape)
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"cluster.scaler: {shlex.join(words)}: {error}") from error
        if done.returncode:
            last = "".join(f": {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-1:])
            raise ClusterError(f"cluster.scaler: {shlex.join(words)}: exit code {done.returncode}{last}")


class SayingScaler:
    """Says what it would do."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def scale(self, shape: ClusterShape, why: str) -> None:
        self._say(f"scale | {shape} would be better: {why}")


def scaler_of(name: str, resize: Callable[..., object], say: Callable[[str], object], *, starts_tasks: bool) -> Scaler:
    """The scaler that `cluster.scaler` names; `starts_tasks` is true if the chief starts the tasks."""
    if name == AUTO:
        name = LOCAL if starts_tasks else NONE
    if name == LOCAL:
        return LocalScaler(resize)
    return SayingScaler(say) if name == NONE else CommandScaler(name)
