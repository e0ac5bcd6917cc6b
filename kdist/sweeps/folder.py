"""A folder of run dirs, on a disk or on object storage, as `load_runs` reads it and a sweep works in it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

from kdist.config.schema import RunConfig
from kdist.errors import ConfigError
from kdist.run.metrics_file import NAME as METRICS
from kdist.storage.files import make_private, relative, written_whole
from kdist.storage.lock import RunLock
from kdist.storage.object_storage import ObjectStorage, StorageError, checked_url, is_url, working_folder
from kdist.storage.storage_lock import StorageLock

RESULT = "result.json"
#: Written by a sweep into the run dir of each trial.
TRIAL = "trial.json"
#: A folder with one of these is a run dir.
_RECORDS = (RESULT, TRIAL, METRICS)


class RunsFolder(Protocol):
    """Reads files of the run dirs below a folder; converts to the folder's name.

    On object storage, every method raises `StorageError`: the storage failed for the time that it may, or refused.
    """

    def run_dirs(self) -> list[str]:
        """The paths of all run dirs in the folder, with `/`; `.` is the folder itself."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""


def runs_folder(place: str | Path) -> RunsFolder:
    """The folder at a path or URL.

    Raises:
        ConfigError: there is no such folder, or a URL is not allowed, or its storage fails or refuses.
    """
    if is_url(place):
        return OnStorage(connected(str(place), "folder", RunConfig.storage_timeout))
    if not Path(place).is_dir():
        raise ConfigError(f"{place}: there is no such folder")
    return OnDisk(Path(place))


def connected(url: str, key: str, timeout: float) -> ObjectStorage:
    """Object storage that has answered.

    Args:
        key: that of the URL, named in errors.

    Raises:
        ConfigError: the URL is not allowed, or the storage fails or refuses.
    """
    storage = ObjectStorage(checked_url(url, key), timeout, key=key)
    try:
        storage.sizes()
    except StorageError as error:
        raise storage.refusal(error) from None
    return storage


class OnDisk:
    def __init__(self, path: Path) -> None:
        self.local = path

    def __str__(self) -> str:
        return str(relative(self.local))

    def run_dirs(self) -> list[str]:
        found = []
        for folder, inner, files in os.walk(self.local):
            if any(name in files for name in _RECORDS):
                found.append(Path(folder).relative_to(self.local).as_posix())
                # What is in a run dir belongs to the run.
                inner.clear()
        return in_order(found)

    def read(self, name: str) -> bytes | None:
        with suppress(OSError):
            return (self.local / name).read_bytes()
        return None


class OnStorage:
    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage

    def __str__(self) -> str:
        return self._storage.url

    def run_dirs(self) -> list[str]:
        parts = (name.rpartition("/") for name in self._storage.sizes())
        found = {PurePosixPath(folder) for folder, _, name in parts if name in _RECORDS}
        return in_order(str(folder) for folder in found if found.isdisjoint(folder.parents))

    def read(self, name: str) -> bytes | None:
        return self._storage.read(name.removeprefix("./"))


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted as a person would: the trials of a sweep by their numbers."""

    def parts(name: str) -> list[tuple[bool, int, str]]:
        return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split("/")]

    return sorted(names, key=parts)


class SweepFolder(RunsFolder, Protocol):
    """Reads and writes what is known of trials, and what a sweep leaves.

    On object storage, every method raises `StorageError`: the storage failed for `run.storage_timeout`, or refused.

    Attributes:
        local: the folder on this machine in which Hydra works.
    """

    local: Path

    def trials(self) -> list[str]:
        """The names of the folders of trials, with `/`."""

    def check_free(self, name: str) -> None:
        """Raises a `ConfigError` if a process trains in the folder of a trial."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file."""

    def take_over(self) -> None:
        """Brings the files that Hydra has written there."""


def sweep_folder(place: str, storage_timeout: float) -> SweepFolder:
    """The folder of a sweep.

    Args:
        place: a path or a URL.
        storage_timeout: seconds for which object storage may fail.

    Raises:
        ConfigError: a URL is not allowed, or the storage fails or refuses.
    """
    if not is_url(place):
        return _OnDisk(Path(place))
    return _OnStorage(connected(place, "hydra.sweep.dir", storage_timeout))


class _OnDisk(OnDisk):
    def trials(self) -> list[str]:
        return [path.parent.relative_to(self.local).as_posix() for path in self.local.rglob(TRIAL)]

    def check_free(self, name: str) -> None:
        RunLock(self.local / name).check()

    def write(self, name: str, content: bytes) -> None:
        path = self.local / name
        make_private(path.parent)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(content)

    def take_over(self) -> None:
        """Hydra works in this folder."""


class _OnStorage(OnStorage):
    def __init__(self, storage: ObjectStorage) -> None:
        super().__init__(storage)
        self.local = working_folder(storage.url)
        self.write = storage.write

    def trials(self) -> list[str]:
        parts = (name.rpartition("/") for name in self._storage.sizes())
        return [folder for folder, _, name in parts if folder and name == TRIAL]

    def check_free(self, name: str) -> None:
        StorageLock(ObjectStorage(f"{self._storage.url}/{name}", self._storage.timeout)).check()

    def take_over(self) -> None:
        for path in self.local.glob("*"):
            if path.is_file():
                self._storage.upload(path, path.name)
