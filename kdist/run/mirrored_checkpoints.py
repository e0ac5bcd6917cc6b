"""`MirroredCheckpoints`: the checkpoints of a run on object storage."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from kdist.cluster.bounded import in_thread
from kdist.console.warn import warn
from kdist.errors import CheckpointError
from kdist.run.checkpoint import Checkpoints, Stored
from kdist.run.files import CHECKPOINT_FILE, INDEX_SUFFIX
from kdist.run.mirror import Mirror
from kdist.run.object_storage import StorageError


class MirroredCheckpoints(Checkpoints):
    """Checkpoints that are saved to a folder, uploaded from there, and downloaded when they are read.

    A checkpoint at the URL is complete or absent, too: its index is uploaded last and deleted first. One that replaces
    another of the same step is absent until it is complete.

    Args:
        folder: in the folder of `mirror`.
        mirror: the run dir.
    """

    def __init__(self, folder: Path, mirror: Mirror) -> None:
        super().__init__(folder)
        self._mirror = mirror

    @property
    def place(self) -> str:
        return f"{self._mirror.url}/{self.folder.name}"

    def beside(self, name: str) -> Checkpoints:
        return MirroredCheckpoints(self.folder.with_name(name), self._mirror)

    def refresh(self) -> None:
        try:
            self._mirror.refresh()
        except StorageError as error:
            raise CheckpointError(f"{self.place}: cannot be listed: {error}") from None

    def tidy(self) -> None:
        self.refresh()
        super().tidy()

    def _names(self) -> set[str]:
        return {*super()._names(), *self._mirror.names_in(self.folder)}

    def _exists(self, name: str) -> bool:
        return super()._exists(name) or bool(self._mirror.names_in(self.folder.with_name(name)))

    def _rename(self, name: str) -> None:
        try:
            self._mirror.move(self.folder, self.folder.with_name(name))
        except StorageError as error:
            raise CheckpointError(f"{self.place} could not be renamed to {name}: {error}") from None
        if self.folder.exists():
            super()._rename(name)

    def _fetch(self, step: int) -> None:
        """Downloads a checkpoint that is not here."""
        index, *data = self._objects(step)
        if index.exists() or index.name not in self._mirror.names_in(self.folder):
            return
        try:
            self._mirror.download([*data, index])
        except StorageError as error:
            raise CheckpointError(f"{self.place}/{index.stem} cannot be downloaded: {error}") from None

    def begin_save(self, step: int, stored: Stored) -> Future[None]:
        written = super().begin_save(step, stored)

        def upload() -> None:
            written.result()
            self._move_into_place(step)

        return in_thread(upload)

    def _move_into_place(self, step: int) -> None:
        if not Path(f"{self._unfinished(step)}{INDEX_SUFFIX}").exists():
            # A thread has uploaded it.
            return
        super()._move_into_place(step)
        index, *stale = self._objects(step)
        data = self._data_of(self.path(step))
        try:
            self._mirror.delete([index, *stale])
            self._mirror.upload([*data, index])
        except StorageError as error:
            raise CheckpointError(
                f"step {step} could not be uploaded: {error}\n  it stays in {self.path(step)}\n"
                f"  if the run ends, copy its files to {self.place}, or the same run.dir resumes from an earlier step"
            ) from None

    def _delete(self, step: int) -> None:
        try:
            self._mirror.delete(self._objects(step))
        except StorageError as error:
            # The next save tries again.
            warn(f"{self.place}/{self.path(step).name} could not be deleted: {error}")
        super()._delete(step)

    def _objects(self, step: int) -> list[Path]:
        """The index of a checkpoint, and its files with data that are at the URL."""
        index = Path(f"{self.path(step)}{INDEX_SUFFIX}")
        names = [
            name
            for name in self._mirror.names_in(self.folder)
            if (match := CHECKPOINT_FILE.fullmatch(name)) and int(match[1]) == step and name != index.name
        ]
        return [index, *(self.folder / name for name in sorted(names))]
