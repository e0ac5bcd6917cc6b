"""`Origin`: where a run comes from: its config, the code in the folder where it ran, the machine and the time."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

#: Seconds that Git may take, on a slow file system.
_GIT_SECS = 3.0


@dataclass(frozen=True)
class Origin:
    """The beginning of a run, as `result.json` records it.

    Attributes:
        config: the config; None if there is none but the arguments of a `Trainer`.
        overrides: `key=value`, of the command line.
        git: `commit` and `dirty` (None if unknown) of the working directory; None outside of a repository.
        host: the name of the machine.
        started: the time of the start; ISO 8601, UTC.
    """

    config: Mapping[str, Any] | None
    overrides: Sequence[str]
    git: Mapping[str, Any] | None
    host: str
    started: str

    @classmethod
    def here_and_now(cls, config: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Origin:
        """The origin of a run that begins in this process."""
        return cls(config, list(overrides), git_state(), socket.gethostname(), now())


def now() -> str:
    """The time, in ISO 8601 and UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def git_state() -> dict[str, Any] | None:
    """The commit of the working directory, and whether files that belong to it have changed since."""
    if (commit := _git("rev-parse", "HEAD")) is None:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    """The output of Git; None without Git, without a commit, or if it takes too long."""
    # A repository may name a program as its monitor; and nothing is written to it.
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            timeout=_GIT_SECS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
