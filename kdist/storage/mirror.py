"""`Mirror`: a run dir on object storage, and the folder on this machine in which its chief works.

Everything is written to the folder first. Checkpoints are uploaded when they are saved; all other files every few
seconds, by a thread, and at the end. The run is what is at the URL; what an earlier chief has left in the folder never
counts.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kdist.errors import ConfigError, KdistError
from kdist.log import warn
from kdist.storage.files import CHECKPOINT_FILE, INDEX_SUFFIX, LEFT_BEHIND, make_private
from kdist.storage.folder import Folder
from kdist.storage.lock import LOCK, RunLock, check_not_taken_over
from kdist.storage.object_storage import (
    UNFINISHED_SUFFIX,
    ObjectStorage,
    StorageError,
    check_url,
    is_url,
    working_folder,
)

_CONFIG = ".hydra"
#: Says that all files of the folder arrived, whatever other chiefs do at the URL.
_ARRIVED = ".arrived"
#: A resumed run reads or deletes these files, besides checkpoints.
_READ_AGAIN = ("result.json", "metrics.csv", "best/validation.json", "placement.txt", "placement.png")
_INTERVAL_SECS = 10.0
#: Uploading takes at most this part of the time.
_BUSY_PART = 0.1


class Mirror(Folder):
    """While entered, this process is the only chief of the run dir at `url`, and `path` is mirrored there.

    Files that changed are uploaded every `interval_secs`; operations that fail are tried again for `timeout` seconds.

    Raises:
        ConfigError: the URL is not allowed. On entering: the storage fails or refuses, or another process is the chief.
        KdistError: on leaving without an error: not everything could be uploaded.
    """

    def __init__(
        self, url: str, timeout: float, path: Path | None = None, *, interval_secs: float = _INTERVAL_SECS
    ) -> None:
        url = check_url(url)
        super().__init__(path or working_folder(url), url)
        self.storage = ObjectStorage(url, timeout, self.path)
        self._interval_secs = interval_secs
        self._locks = RunLock(Folder(self.path, url)), RunLock(self.storage)
        #: The objects at the URL, which only the chief changes.
        self._sizes: dict[str, int] = {}
        #: The files that were uploaded, by their modification times and sizes.
        self._sent: dict[str, tuple[int, int]] = {}
        self._pushing = threading.Lock()
        self._ended = threading.Event()
        self._entered = ExitStack()

    def check(self) -> None:
        """Raises the `ConfigError` that entering would raise for another chief, or for storage that refuses."""
        try:
            for lock in self._locks:
                lock.check()
        except StorageError as error:
            raise self.storage.refusal(error) from None

    def __enter__(self) -> Mirror:
        try:
            with ExitStack() as entered:
                for lock in self._locks:
                    entered.enter_context(lock)
                self._begin()
                self._ended.clear()
                pushing = threading.Thread(target=self._keep_pushing, daemon=True, name="kdist-mirror")
                pushing.start()
                entered.callback(pushing.join, self.storage.timeout)
                self._entered = entered.pop_all()
        except StorageError as error:
            raise self.storage.refusal(error) from None
        except OSError as error:
            raise ConfigError(f"run.dir={self}: {self.path}: cannot be written: {error.strerror or error}") from error
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ended.set()
        with self._entered:
            try:
                self.push()
            except KdistError as failure:
                if error is None:
                    raise
                warn(str(failure))
            else:
                if not self._unsent():
                    (self.path / _ARRIVED).touch()

    def push(self) -> None:
        """Uploads all files but checkpoints, as far as they have changed; deletes what was deleted.

        Raises `KdistError` if that fails, also the `ConfigError` of another chief that has taken over the run dir.
        """
        try:
            self._push(self.storage)
        except StorageError as error:
            raise KdistError(
                f"{error}\n  not everything is there; all of it is in {self.path}\n"
                "  copy it to the URL, or give the same run.dir again when the storage is back"
            ) from None

    def refresh(self) -> None:
        self._sizes = {name: size for name, size in self.storage.sizes().items() if not _is_passing(name)}

    def names(self, under: str = "", *, ends: Collection[str] = ()) -> set[str]:
        start = f"{under}/" if under else ""
        there = {name.removeprefix(start) for name in list(self._sizes) if name.startswith(start)}
        return super().names(under) | there

    def publish(self, names: Sequence[str], instead_of: Sequence[str] = ()) -> None:
        """As of any folder; raises `ConfigError` if another chief has taken over the run dir."""
        check_not_taken_over(self.storage)
        self._delete_objects(instead_of)
        for name in names:
            self.storage.publish([name])
            self._sizes[name] = (self.path / name).stat().st_size

    def publish_after(self, written: Future[None], publish: Callable[[], None]) -> Future[None]:
        return self.storage.publish_after(written, publish)

    def fetch(self, names: Sequence[str]) -> None:
        self.storage.fetch(names)

    def delete(self, names: Sequence[str]) -> None:
        """As of any folder; raises `ConfigError` if another chief has taken over the run dir."""
        if any(name in self._sizes for name in names):
            check_not_taken_over(self.storage)
        super().delete(names)
        self._delete_objects(names)

    def move(self, under: str, to: str, names: Sequence[str] | None = None) -> None:
        """As of any folder. Objects are copied with indices last, and deleted with indices first.

        If it raises `StorageError`, not all were moved; all are still at one place, or at both.
        """
        check_not_taken_over(self.storage)
        there = [name for name in sorted(self.names(under)) if f"{under}/{name}" in self._sizes]
        moved = sorted(set(there if names is None else names) & set(there), key=lambda n: n.endswith(INDEX_SUFFIX))
        self.storage.move(under, to, moved)
        for name in moved:
            self._sizes[f"{to}/{name}"] = self._sizes.pop(f"{under}/{name}")
        if (self.path / under).exists():
            here = super().names(under)
            super().move(under, to, None if names is None else [name for name in names if name in here])

    @contextmanager
    def open_for(self, reader: str) -> Iterator[Folder]:
        """Yields the storage with an empty folder for copies, which is deleted at the end; see `Folder.open_for`."""
        path = self.path.with_name(f"{self.path.name}-{reader.replace(':', '-')}")
        storage = ObjectStorage(self.storage.url, self.storage.timeout, path).connect()
        with RunLock(Folder(path, f"{self} ({reader})")):
            try:
                # A process that was killed has left them.
                for left in path.iterdir():
                    if left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)
                    elif left.name != LOCK:
                        left.unlink()
                yield storage
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def _delete_objects(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._sizes:
                self.storage.delete([name])
                del self._sizes[name]

    def _begin(self) -> None:
        """Deletes unfinished uploads, empties the folder, and brings there what a resumed run reads."""
        self.refresh()
        for name in sorted(self._sizes):
            folder, slash, file = name.rpartition("/")
            found = CHECKPOINT_FILE.fullmatch(file)
            # The index is uploaded last, and deleted first.
            has_no_index = found and f"{folder}{slash}{found[1]}{INDEX_SUFFIX}" not in self._sizes
            if name.endswith(UNFINISHED_SUFFIX) or has_no_index:
                self._delete_objects([name])
        self._empty_folder()
        kept = [name for name in _READ_AGAIN if name in self._sizes]
        self.fetch(kept)
        self._sent = {name: _stamp(self.path / name) for name in kept}

    def _empty_folder(self) -> None:
        """Sets files of an earlier run that did not arrive at the URL aside, and deletes the others."""
        if not (self.path / _ARRIVED).exists() and (unsent := self._unsent()):
            places = (self.path.with_name(f"{self.path.name}-unsent-{number}") for number in itertools.count(1))
            aside = next(path for path in places if not path.exists())
            make_private(aside)
            for path in unsent:
                target = aside / path.relative_to(self.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
            warn(f"{self}: files of an earlier run on this machine did not arrive there; they are in {aside}")
        for name, path in self._files().items():
            # Hydra has just written the config of this run.
            if not name.startswith(f"{_CONFIG}/"):
                path.unlink()
        for path in sorted(self.path.rglob("*/"), reverse=True):
            with suppress(OSError):
                path.rmdir()

    def _unsent(self) -> list[Path]:
        """The files of which nothing of the same size is at the URL; not Hydra's."""
        files = self._files()
        own = (name for name in files if not _is_passing(name) and not name.startswith(f"{_CONFIG}/"))
        return [files[name] for name in own if self._sizes.get(name) != files[name].stat().st_size]

    def _push(self, storage: ObjectStorage) -> None:
        with self._pushing:
            check_not_taken_over(storage)
            present = set()
            for name, path in self._files().items():
                if _is_passing(name) or CHECKPOINT_FILE.fullmatch(path.name):
                    continue
                try:
                    stamp = _stamp(path)
                    if self._sent.get(name) != stamp:
                        storage.publish([name])
                        self._sent[name], self._sizes[name] = stamp, stamp[1]
                except (FileNotFoundError, StorageError):
                    # It may have been deleted or renamed meanwhile.
                    if path.exists():
                        raise
                else:
                    present.add(name)
            for name in self._sent.keys() - present:
                storage.delete([name])
                del self._sent[name]
                self._sizes.pop(name, None)

    def _keep_pushing(self) -> None:
        # One attempt each time: the next one follows.
        storage, pause, has_failed = self.storage.without_retries(), self._interval_secs, False
        while not self._ended.wait(pause):
            began = time.monotonic()
            try:
                self._push(storage)
                has_failed = False
            except (KdistError, OSError) as error:
                if not has_failed:
                    warn(f"{error}; logs and summaries are uploaded later")
                has_failed = True
            pause = max(self._interval_secs, (time.monotonic() - began) / _BUSY_PART)

    def _files(self) -> dict[str, Path]:
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file() and path.name != LOCK)
        return {path.relative_to(self.path).as_posix(): path for path in found}


def chief_folder(place: str, path: Path, timeout: float) -> Folder:
    """The folder of a run dir, a path or a URL, whose chief works in `path` on this machine."""
    return Mirror(place, timeout, path.absolute()) if is_url(place) else Folder(path)


def lock_of(folder: Folder) -> RunLock | Mirror:
    """The lock that keeps other chiefs out of a run dir while it is entered; a `Mirror` mirrors the folder as well."""
    return folder if isinstance(folder, Mirror) else RunLock(folder)


def _is_passing(name: str) -> bool:
    """True for a lock, and for a file that is being written under another name."""
    return any((part.startswith(".") and part != _CONFIG) or LEFT_BEHIND.fullmatch(part) for part in name.split("/"))


def _stamp(path: Path) -> tuple[int, int]:
    """The modification time and size of a file, by which a change is seen."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size
