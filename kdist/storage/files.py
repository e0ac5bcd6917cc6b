"""Folders that only their owner can enter, and files that are complete or absent."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER_ONLY = 0o700
#: The folders in which hooks keep the best values of a run, beside its checkpoints.
BEST, EARLY_STOPPING = BEST_FOLDERS = ("best", "early_stopping")
#: The name of a folder to which checkpoints of another one were moved, and its number.
SET_ASIDE = re.compile(r"(.+)-before-(\d+)")
INDEX_SUFFIX = ".index"
#: A file of a checkpoint or a delta: its name without a suffix, its kind, its global step.
CHECKPOINT_FILE = re.compile(r"((ckpt|delta)-(\d+))\.(?:index|data-\d+-of-\d+)")
#: Files that an unfinished save leaves behind: kdist's and TensorFlow's.
LEFT_BEHIND = re.compile(r"unfinished-.*|.*\.tempstate.*|.*_temp(?:-.*)?|\.checkpoint")


def make_private(path: Path) -> None:
    """Creates a folder that only its owner can enter, and its parents as usual; an existing one is not changed."""
    path.mkdir(OWNER_ONLY, parents=True, exist_ok=True)


def make_new(path: Path) -> Path:
    """Creates a folder that only its owner can enter, with a number after its name if there is one of that name."""
    name = path.name
    for number in itertools.count(2):
        with suppress(FileExistsError):
            path.mkdir(OWNER_ONLY, parents=True)
            break
        path = path.with_name(f"{name}_{number}")
    return path


def has_locks(folder: Path) -> bool:
    """True if files in a folder can be locked: on some network file systems, as NFS without its daemon, they cannot."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def relative(path: Path) -> Path:
    """A path as a person would write it: relative to the working directory, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields another path to write to, and renames it to `path`; if that fails, the earlier file is untouched."""
    unfinished = path.with_name(f".{path.name}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is complete or absent; see `written_whole`."""
    with written_whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
