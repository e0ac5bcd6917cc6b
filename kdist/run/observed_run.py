"""`ObservedRun`: a run dir as another process than its chief sees it, on a disk or on object storage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kdist.cluster.spec import Task
from kdist.run.checkpoint import Checkpoints
from kdist.run.result import content_of
from kdist.run.run_dir import RunDir
from kdist.run.summaries import Summaries
from kdist.storage.files import CHECKPOINT_FILE
from kdist.storage.lock import RunLock
from kdist.storage.object_storage import NotThereError, ObjectStorage, StorageError, working_folder
from kdist.storage.storage_lock import StorageLock


class ObservedRun(Protocol):
    """What others than the chief read in its run dir, and the one thing that an evaluator writes there.

    On object storage, every use raises `StorageError`: the storage failed for `run.storage_timeout`, or refused.
    """

    @property
    def lock(self) -> RunLock | StorageLock:
        """What the chief holds."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Those that the chief has saved; only read."""

    @property
    def poll_secs(self) -> float:
        """Seconds between two looks for news."""

    def result_written_at(self) -> float | None:
        """When `result.json` was written, in seconds since the epoch by the clock there; None without one."""

    def read_result(self) -> dict[str, Any]:
        """The content of `result.json`; empty if it is missing or unreadable."""

    def file(self, name: str) -> Path | None:
        """A file of the run dir, on this machine; None if there is none. One from object storage is a copy."""

    def report(self, logs: Mapping[str, Any], step: int) -> None:
        """Writes the loss and metrics of a checkpoint to `tb/evaluator`."""


@contextmanager
def observed(files: RunDir, task: Task) -> Iterator[ObservedRun]:
    """Yields what `task` sees of a run dir that another process trains in.

    Raises:
        ConfigError: it is on object storage that refuses or cannot be reached, or a process on this machine is `task`.
    """
    if files.storage is None:
        summaries = files.summaries()
        try:
            yield _OnDisk(files, summaries)
        finally:
            summaries.close()
        return
    with _folder_of(files.storage, task) as folder:
        summaries = Summaries(folder / "tb")
        try:
            yield _OnStorage(files.storage, folder, summaries)
        finally:
            summaries.close()


class _OnDisk:
    poll_secs = 0.5

    def __init__(self, files: RunDir, summaries: Summaries) -> None:
        self.lock = RunLock(files.path)
        self.checkpoints = files.checkpoints()
        self.result_written_at = files.result_written_at
        self.read_result = files.read_result
        self.report = summaries.evaluation
        self._files = files

    def __str__(self) -> str:
        return str(self._files)

    def file(self, name: str) -> Path | None:
        path = self._files.path / name
        return path if path.is_file() else None


class _OnStorage:
    # A look is several requests, which cost money.
    poll_secs = 5.0

    def __init__(self, storage: ObjectStorage, folder: Path, summaries: Summaries) -> None:
        self.lock = StorageLock(storage)
        self.checkpoints = _DownloadedCheckpoints(storage, folder / "checkpoints")
        self._storage = storage
        self._folder = folder
        self._summaries = summaries

    def __str__(self) -> str:
        return self._storage.url

    def result_written_at(self) -> float | None:
        with suppress(NotThereError):
            return self._storage.modified("result.json").timestamp()
        return None

    def read_result(self) -> dict[str, Any]:
        return content_of(self._storage.read("result.json") or b"")

    def file(self, name: str) -> Path | None:
        with suppress(NotThereError):
            self._storage.download(name, self._folder / name)
            return self._folder / name
        return None

    def report(self, logs: Mapping[str, Any], step: int) -> None:
        self._summaries.evaluation(logs, step)
        for path in (self._folder / "tb").rglob("events*"):
            self._storage.upload(path, path.relative_to(self._folder).as_posix())


class _DownloadedCheckpoints(Checkpoints):
    """Checkpoints that another process uploads; one is on this machine only while it is read."""

    def __init__(self, storage: ObjectStorage, folder: Path) -> None:
        super().__init__(folder)
        self._storage = storage

    @property
    def place(self) -> str:
        return f"{self._storage.url}/{self.folder.name}"

    def read(self, step: int) -> dict[str, np.ndarray] | None:
        try:
            return super().read(step)
        except NotThereError:
            # Deleted meanwhile.
            return None
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _fetch(self, path: Path) -> None:
        for name in self._names():
            if (found := CHECKPOINT_FILE.fullmatch(name)) and found[1] == path.name:
                self._storage.download(f"{self.folder.name}/{name}", self.folder / name)

    def _names(self) -> set[str]:
        start = f"{self.folder.name}/"
        return {name.removeprefix(start) for name in self._storage.sizes() if name.startswith(start)}


@contextmanager
def _folder_of(storage: ObjectStorage, task: Task) -> Iterator[Path]:
    """Yields an empty folder of this machine for `task`, which is deleted at the end; no other process has it."""
    chief = working_folder(storage.url)
    folder = chief.with_name(f"{chief.name}-{task.job}-{task.index}")
    try:
        storage.sizes()
    except StorageError as error:
        raise storage.refusal(error) from None
    with RunLock(folder, f"{storage.url} ({task})"):
        try:
            # What one that was killed has left.
            for name in ("checkpoints", "tb"):
                shutil.rmtree(folder / name, ignore_errors=True)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
