"""The folder of a sweep, on a disk or on object storage: small files by their names in it, such as `3/trial.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kdist.run.files import make_private, written_whole
from kdist.run.object_storage import ObjectStorage, is_url, working_folder
from kdist.run.run_lock import RunLock
from kdist.run.storage_lock import StorageLock
from kdist.runs.folder import TRIAL, OnDisk, OnStorage, RunsFolder, connected


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
