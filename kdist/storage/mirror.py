"""`Mirror`: a run dir on object storage, and the folder on this machine in which its chief works.

Everything is written to the folder first. Checkpoints are uploaded when they are saved, by
`kdist.run.mirrored_checkpoints`; all other files every few seconds, by a thread, and at the end. What is at the URL is
the run; what an earlier chief has left in the folder never counts.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kdist.errors import ConfigError, KdistError
from kdist.log import warn
from kdist.storage.files import CHECKPOINT_FILE, INDEX_SUFFIX, LEFT_BEHIND, make_private
from kdist.storage.lock import RunLock
from kdist.storage.object_storage import UNFINISHED_SUFFIX, ObjectStorage, StorageError, checked_url, working_folder
from kdist.storage.storage_lock import LOCK, StorageLock, check_not_taken_over

_CONFIG = ".hydra"
#: Says that all files of the folder arrived, whatever other chiefs do at the URL.
_ARRIVED = ".arrived"
#: What a resumed run reads or deletes, besides checkpoints.
_READ_AGAIN = ("result.json", "metrics.csv", "best/validation.json", "placement.txt", "placement.png")
_INTERVAL_SECS = 10.0
#: Uploading takes at most this part of the time.
_BUSY_PART = 0.1

# The modification time and size of a file, by which a change is seen.
_Stamp = tuple[int, int]


class Mirror:
    """While entered, this process is the only chief of the run dir at `url`, and `folder` is mirrored there.

    Args:
        url: as `s3://bucket/folder`.
        timeout: seconds for which an operation of the storage that fails is tried again.
        folder: on this machine; None: `working_folder` of the URL.
        interval_secs: seconds between uploads of files that changed.

    Raises:
        ConfigError: the URL is not allowed. On entering: the storage fails or refuses, or another process is the chief.
        KdistError: on leaving without an error: not everything could be uploaded.
    """

    def __init__(
        self, url: str, timeout: float, folder: Path | None = None, *, interval_secs: float = _INTERVAL_SECS
    ) -> None:
        self.url = checked_url(url)
        self.folder = folder or working_folder(url)
        self.storage = ObjectStorage(self.url, timeout)
        self._interval_secs = interval_secs
        self._local_lock = RunLock(self.folder, self.url)
        self._lock = StorageLock(self.storage)
        #: The objects at the URL, which only the chief changes.
        self._sizes: dict[str, int] = {}
        self._sent: dict[str, _Stamp] = {}
        self._pushing = threading.Lock()
        self._ended = threading.Event()
        self._held = ExitStack()

    def __getstate__(self) -> tuple[Any, ...]:
        # The chief may be a child of the process that entered.
        return self.url, self.storage.timeout, self.folder, self._lock.holder, dict(self._sizes), dict(self._sent)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        url, timeout, folder, holder, sizes, sent = state
        Mirror.__init__(self, url, timeout, folder)
        self._lock.holder, self._sizes, self._sent = holder, sizes, sent

    def check(self) -> None:
        """Raises the `ConfigError` that entering would raise for another chief, or for storage that refuses."""
        self._local_lock.check()
        try:
            self._lock.check()
        except StorageError as error:
            raise self.storage.refusal(error) from None

    def __enter__(self) -> Mirror:
        try:
            with ExitStack() as entered:
                entered.enter_context(self._local_lock)
                entered.enter_context(self._lock)
                self._begin()
                self._ended.clear()
                pushing = threading.Thread(target=self._keep_pushing, daemon=True, name="kdist-mirror")
                pushing.start()
                entered.callback(pushing.join, self.storage.timeout)
                self._held = entered.pop_all()
        except StorageError as error:
            raise self.storage.refusal(error) from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={self.url}: {self.folder}: cannot be written: {error.strerror or error}"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._held:
            try:
                self.push()
            except KdistError as failure:
                if error is None:
                    raise
                warn(str(failure))
            else:
                # Otherwise the next chief on this machine looks for itself.
                with suppress(StorageError):
                    self._note_arrival()

    def push(self) -> None:
        """Uploads all files but checkpoints, as far as they have changed; deletes what was deleted.

        Raises:
            KdistError: not everything could be uploaded.
            ConfigError: another chief has taken over the run dir.
        """
        try:
            self._push(self.storage)
        except StorageError as error:
            raise KdistError(
                f"{error}\n  not everything is there; all of it is in {self.folder}\n"
                "  copy it to the URL, or give the same run.dir again when the storage is back"
            ) from None

    def refresh(self) -> None:
        """Looks again at what is at the URL."""
        self._sizes = {name: size for name, size in self.storage.sizes().items() if not _is_passing(name)}

    def names_in(self, folder: Path) -> list[str]:
        """The names of the objects in a folder of the run dir."""
        start = f"{self._name(folder)}/"
        return [name.removeprefix(start) for name in list(self._sizes) if name.startswith(start)]

    def upload(self, paths: Sequence[Path]) -> None:
        """Uploads files, in this order.

        Raises:
            StorageError: not all of them could be uploaded.
            ConfigError: another chief has taken over the run dir.
        """
        check_not_taken_over(self.storage, self._lock.holder)
        for path in paths:
            self.storage.upload(path, self._name(path))
            self._sizes[self._name(path)] = path.stat().st_size

    def download(self, paths: Sequence[Path]) -> None:
        """Downloads files, in this order; raises `StorageError`."""
        for path in paths:
            self.storage.download(self._name(path), path)

    def delete(self, paths: Sequence[Path]) -> None:
        """Deletes the objects of files, in this order, those that are there; raises what `upload` raises."""
        if names := [name for name in map(self._name, paths) if name in self._sizes]:
            check_not_taken_over(self.storage, self._lock.holder)
        for name in names:
            self.storage.delete(name)
            del self._sizes[name]

    def move(self, folder: Path, to: Path, names: Sequence[str] | None = None) -> None:
        """Moves the objects of a folder: they are copied with indices last, and deleted with indices first.

        Args:
            names: of the objects; None: all of them.

        Raises:
            StorageError: not all were moved; all are still at one place, or at both.
        """
        there = self.names_in(folder)
        names = sorted(set(there) & set(there if names is None else names), key=lambda n: n.endswith(INDEX_SUFFIX))
        for name in names:
            self.storage.copy(self._name(folder / name), self._name(to / name))
            self._sizes[self._name(to / name)] = self._sizes[self._name(folder / name)]
        self.delete([folder / name for name in reversed(names)])

    def _begin(self) -> None:
        """Empties the folder, and brings there what a resumed run reads."""
        self.refresh()
        self._delete_unfinished_uploads()
        self._empty_folder()
        self._sent = {}
        for path in (self.folder / name for name in _READ_AGAIN if name in self._sizes):
            self.download([path])
            self._sent[self._name(path)] = _stamp(path)

    def _delete_unfinished_uploads(self) -> None:
        """Deletes parts of files, and data of checkpoints without an index, which is uploaded last, deleted first."""
        for name in sorted(self._sizes):
            path = self.folder / name
            if name.endswith(UNFINISHED_SUFFIX):
                self.delete([path])
            if (match := CHECKPOINT_FILE.fullmatch(path.name)) and self._name(
                path.with_name(f"{match[1]}{INDEX_SUFFIX}")
            ) not in self._sizes:
                self.delete([path])

    def _empty_folder(self) -> None:
        """Sets files of an earlier run that did not arrive at the URL aside, and deletes the others."""
        if not (self.folder / _ARRIVED).exists() and (unsent := self._unsent()):
            self._move_aside(unsent)
        for path in list(_files_in(self.folder)):
            # Hydra has just written the config of this run.
            if not self._name(path).startswith(f"{_CONFIG}/"):
                path.unlink()
        for path in sorted(self.folder.rglob("*/"), reverse=True):
            with suppress(OSError):
                path.rmdir()

    def _note_arrival(self) -> None:
        # A child may have uploaded checkpoints.
        self.refresh()
        if not self._unsent():
            (self.folder / _ARRIVED).touch()

    def _unsent(self) -> list[Path]:
        """The files of which nothing of the same size is at the URL."""
        return [
            path
            for path in _files_in(self.folder)
            if not _is_passing(name := self._name(path))
            and not name.startswith(f"{_CONFIG}/")
            and self._sizes.get(name) != path.stat().st_size
        ]

    def _move_aside(self, unsent: Sequence[Path]) -> None:
        numbers = itertools.count(1)
        aside = next(
            path for n in numbers if not (path := self.folder.with_name(f"{self.folder.name}-unsent-{n}")).exists()
        )
        make_private(aside)
        for path in unsent:
            target = aside / path.relative_to(self.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
        warn(f"{self.url}: files of an earlier run on this machine did not arrive there; they are in {aside}")

    def _push(self, storage: ObjectStorage) -> None:
        with self._pushing:
            check_not_taken_over(storage, self._lock.holder)
            present = set()
            for path in _files_in(self.folder):
                if _is_passing(name := self._name(path)) or CHECKPOINT_FILE.fullmatch(path.name):
                    continue
                try:
                    stamp = _stamp(path)
                    if self._sent.get(name) != stamp:
                        storage.upload(path, name)
                        self._sent[name], self._sizes[name] = stamp, stamp[1]
                except (FileNotFoundError, StorageError):
                    # It may have been deleted or renamed meanwhile.
                    if path.exists():
                        raise
                else:
                    present.add(name)
            for name in self._sent.keys() - present:
                storage.delete(name)
                del self._sent[name]
                self._sizes.pop(name, None)

    def _keep_pushing(self) -> None:
        # One attempt each time: the next one follows.
        storage, pause, has_warned = ObjectStorage(self.url, timeout=0), self._interval_secs, False
        while not self._ended.wait(pause):
            began = time.monotonic()
            try:
                self._push(storage)
                has_warned = False
            except (KdistError, OSError) as error:
                if not has_warned:
                    warn(f"{error}; logs and summaries are uploaded later")
                has_warned = True
            pause = max(self._interval_secs, (time.monotonic() - began) / _BUSY_PART)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def _files_in(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != LOCK)


def _is_passing(name: str) -> bool:
    """Whether a file is a lock, or being written under another name."""
    return any((part.startswith(".") and part != _CONFIG) or LEFT_BEHIND.fullmatch(part) for part in name.split("/"))


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
