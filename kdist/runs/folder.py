"""A folder that holds run dirs, on a disk or on object storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

from kdist.config.schema import RunConfig
from kdist.errors import ConfigError
from kdist.run.files import relative
from kdist.run.metrics_file import NAME as METRICS
from kdist.run.object_storage import ObjectStorage, StorageError, checked_url, is_url

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
