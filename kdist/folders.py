"""What a run leaves behind: folders that only their owner can enter, files that are complete or absent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

OWNER_ONLY = 0o700


def make_private(path: Path) -> None:
    """Makes a folder for its owner alone, and those above it as usual; one that is there stays as it is."""
    path.mkdir(OWNER_ONLY, parents=True, exist_ok=True)


def relative(path: Path) -> Path:
    """A path as a person would say it: from the working directory, if it is in there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is complete or absent.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    unfinished = path.with_name(f".{path.name}")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
