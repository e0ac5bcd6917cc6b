"""`MirroredCheckpoints`: the checkpoints of a run on object storage."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from kdist.errors import CheckpointError
from kdist.log import warn
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.run.checkpoint import Checkpoints
from kdist.storage.files import CHECKPOINT_FILE, INDEX_SUFFIX
from kdist.storage.mirror import Mirror
from kdist.storage.object_storage import StorageError
from kdist.strategies.base import Values
from kdist.threads import in_thread


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

    def _move(self, names: Sequence[str] | None, folder: str) -> None:
        try:
            self._mirror.move(self.folder, self.folder.with_name(folder), names)
        except StorageError as error:
            raise CheckpointError(f"{self.place} could not be moved to {folder}: {error}") from None
        if self.folder.exists():
            here = {path.name for path in self._files()}
            super()._move(None if names is None else [name for name in names if name in here], folder)

    def _fetch(self, path: Path) -> None:
        """Downloads a checkpoint that is not here."""
        index, *data = self._objects(path)
        if index.exists() or index.name not in self._mirror.names_in(self.folder):
            return
        try:
            self._mirror.download([*data, index])
        except StorageError as error:
            raise CheckpointError(f"{self.place}/{index.stem} cannot be downloaded: {error}") from None

    def begin_save(self, step: int, values: Values, *, since: DeltaBase | None = None) -> Future[None]:
        written = super().begin_save(step, values, since=since)

        def upload() -> None:
            written.result()
            self._move_into_place(self._target(step, since))

        return in_thread(upload)

    def _move_into_place(self, target: Path) -> None:
        if not Path(f"{self._unfinished(target)}{INDEX_SUFFIX}").exists():
            # A thread has uploaded it.
            return
        super()._move_into_place(target)
        index, *stale = self._objects(target)
        data = self._data_of(target)
        try:
            self._mirror.delete([index, *stale])
            self._mirror.upload([*data, index])
        except StorageError as error:
            raise CheckpointError(
                f"step {target.name.rpartition('-')[2]} could not be uploaded: {error}\n  it stays in {target}\n"
                f"  if the run ends, copy its files to {self.place}, or the same run.dir resumes from an earlier step"
            ) from None

    def _delete(self, path: Path) -> None:
        try:
            self._mirror.delete(self._objects(path))
        except StorageError as error:
            # The next save tries again.
            warn(f"{self.place}/{path.name} could not be deleted: {error}")
        super()._delete(path)

    def _objects(self, path: Path) -> list[Path]:
        """The index of a checkpoint, and its files with data that are at the URL."""
        index = Path(f"{path}{INDEX_SUFFIX}")
        names = [
            name
            for name in self._mirror.names_in(self.folder)
            if (match := CHECKPOINT_FILE.fullmatch(name)) and match[1] == path.name and name != index.name
        ]
        return [index, *(self.folder / name for name in sorted(names))]
