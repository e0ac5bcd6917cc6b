"""The folder of a sweep, on a disk or on object storage: small files by their names in it, such as `3/trial.json`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kdist.run.files import make_private, relative, written_whole
from kdist.run.object_storage import ObjectStorage, StorageError, checked_url, is_url, working_folder

_KEY = "hydra.sweep.dir"
RECORD = "trial.json"


class SweepFolder(Protocol):
    """Reads and writes what is known of trials, and what a sweep leaves; converts to the folder's name.

    On object storage, every method raises `StorageError`: the storage failed for `run.storage_timeout`, or refused.

    Attributes:
        local: the folder on this machine in which Hydra works.
    """

    local: Path

    def trials(self) -> list[str]:
        """The names of the folders of trials."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""

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
    storage = ObjectStorage(checked_url(place, _KEY), storage_timeout, key=_KEY)
    try:
        storage.sizes()
    except StorageError as error:
        raise storage.refusal(error) from None
    return _OnStorage(storage)


class _OnDisk:
    def __init__(self, path: Path) -> None:
        self.local = path

    def __str__(self) -> str:
        return str(relative(self.local))

    def trials(self) -> list[str]:
        return [path.parent.name for path in self.local.glob(f"*/{RECORD}")]

    def read(self, name: str) -> bytes | None:
        with suppress(OSError):
            return (self.local / name).read_bytes()
        return None

    def write(self, name: str, content: bytes) -> None:
        path = self.local / name
        make_private(path.parent)
        with written_whole(path) as unfinished:
            unfinished.write_bytes(content)

    def take_over(self) -> None:
        """Hydra works in this folder."""


class _OnStorage:
    def __init__(self, storage: ObjectStorage) -> None:
        self.local = working_folder(storage.url)
        self._storage = storage
        self.read = storage.read
        self.write = storage.write

    def __str__(self) -> str:
        return self._storage.url

    def trials(self) -> list[str]:
        parts = (name.split("/") for name in self._storage.sizes())
        return [folder for folder, *rest in parts if rest == [RECORD]]

    def take_over(self) -> None:
        for path in self.local.glob("*"):
            if path.is_file():
                self._storage.upload(path, path.name)
