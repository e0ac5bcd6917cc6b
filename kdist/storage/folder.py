"""`Folder`: the files of a run, or of many runs, wherever they are.

This one is on a disk. `kdist.storage.object_storage.ObjectStorage` is one at a URL, and `kdist.storage.mirror.Mirror`
one on this machine whose files go to a URL as well. Code that holds a folder never asks for its kind.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from kdist.storage.files import make_private, written_whole


class Folder:
    """A folder on a disk.

    Files have names relative to the folder, with `/`. Every method may raise `OSError`; at a URL, every method may
    raise `StorageError` instead: the storage failed for the time that it has, or refused at once.

    Args:
        path: the place of its files, or of copies of them, on this machine.
        name: its name for people; None: the path.
    """

    #: False of object storage, where each look is a request, which costs money.
    looks_are_free: ClassVar[bool] = True

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._name = str(path) if name is None else name

    def __str__(self) -> str:
        return self._name

    def __truediv__(self, name: str) -> Folder:
        """A folder in this one."""
        return Folder(self.path / name, f"{self}/{name}")

    def place_of(self, name: str) -> str:
        """The path or URL of a file, for people."""
        return str(self.path / name)

    def make(self) -> None:
        """Creates the folder, for its owner alone, if there is none."""
        make_private(self.path)

    def names(self, under: str = "", *, ends: Collection[str] = ()) -> set[str]:
        """The names of all files below a folder in this one, relative to it.

        What lies in folders beside a file whose name is in `ends` is not wanted, and may be left out.
        """
        found, top = set[str](), str(self.path / under)
        for folder, inner, names in os.walk(top):
            if not set(ends).isdisjoint(names):
                inner.clear()
            within = folder[len(top) + 1 :]
            found.update(f"{within}/{name}" if within else name for name in names)
        return found

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it is not there."""
        with suppress(OSError):
            return (self.path / name).read_bytes()
        return None

    def modified(self, name: str) -> float | None:
        """The time of the last change of a file, in seconds since the epoch by the clock there; None without one."""
        with suppress(OSError):
            return (self.path / name).stat().st_mtime
        return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file; it is complete or absent."""
        path = self.path / name
        make_private(path.parent)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(content)

    def touch(self, name: str, content: bytes) -> None:
        """Gives a file with this content the present time."""
        os.utime(self.path / name)

    def delete(self, names: Sequence[str]) -> None:
        """Deletes the files that are there, in this order."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def move(self, under: str, to: str, names: Sequence[str] | None = None) -> None:
        """Moves files from one folder in this one to another, in this order; None: all of them, indices last."""
        target = self.path / to
        if names is None:
            (self.path / under).rename(target)
            return
        target.mkdir()
        for name in names:
            (self.path / under / name).replace(target / name)

    def fetch(self, names: Sequence[str]) -> None:
        """Brings files to `path`, in this order; here, they are there."""

    def discard_copies(self, under: str) -> None:
        """Deletes the copies that `fetch` has brought into a folder in this one; here, there are none."""

    def publish(self, names: Sequence[str], instead_of: Sequence[str] = ()) -> None:
        """Brings files from `path` to their place, in this order, after others were deleted; here, they are there."""

    def publish_after(self, written: Future[None], publish: Callable[[], None]) -> Future[None]:
        """Calls `publish` in a thread once files are written, if that takes long; returns a future of both."""
        return written

    def push(self) -> None:
        """Brings all other files from `path` to their place; here, they are there."""

    def refresh(self) -> None:
        """Lists the files again, if their names are remembered."""

    def without_retries(self) -> Folder:
        """The same folder, whose failures are not waited out."""
        return self

    @contextmanager
    def open_for(self, reader: str) -> Iterator[Folder]:
        """Yields the folder for a process that does not own it; at a URL, its copies have their own place.

        Raises `ConfigError` if it cannot be reached, or a process on this machine has the same name as `reader`.
        """
        yield self

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """While entered, no other process that calls this for the same file may enter, as far as the system allows."""
        path = self.path / name
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                # Some network file systems have no locks; there, two chiefs must not start in the same millisecond.
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _is_at(descriptor, path):
                    yield
                    return
            finally:
                os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """True unless an open file was removed or replaced before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
