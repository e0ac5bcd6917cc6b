"""`StorageLock`: one chief for each run dir on object storage, as far as object storage allows."""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from types import TracebackType

from kdist.errors import ConfigError
from kdist.log import warn
from kdist.storage.lock import HEARTBEAT_SECS, STALE_SECS, Holder, holder_in
from kdist.storage.object_storage import NotThereError, ObjectStorage, StorageError

LOCK = ".lock"


class StorageLock:
    """While entered, the object `.lock` names this process, and is written again every few seconds.

    A chief that finds the name of another one, written less than a minute ago by the storage's own clock, does not
    start. Writing is not atomic together with reading: of two chiefs that start in the same second, both may. Then the
    second name stays, and the first chief ends before its next upload. One that was suspended for more than a minute
    ends in the same way if another one took over.

    Args:
        storage: the run dir.
        heartbeat_secs: seconds between heartbeats.
        stale_secs: seconds without one after which a lock counts as left behind.

    Raises:
        ConfigError: on entering: another process is the chief.
        StorageError: the storage fails or refuses.
    """

    def __init__(
        self, storage: ObjectStorage, *, heartbeat_secs: float = HEARTBEAT_SECS, stale_secs: float = STALE_SECS
    ) -> None:
        self._storage = storage
        self._heartbeat_secs = heartbeat_secs
        self._stale_secs = stale_secs
        #: The process that has entered.
        self.holder: Holder | None = None
        self._released = threading.Event()

    def check(self) -> None:
        """Raises the `ConfigError` that entering would raise for another chief."""
        if (found := self._living()) is not None:
            holder, age = found
            raise ConfigError(
                f"run.dir={self._storage.url}: is in use by {holder} since {holder.since}; its last heartbeat was "
                f"{age:.0f} s ago\n  wait for it, or choose another run.dir; if it was killed, start again in "
                f"{self._stale_secs - age:.0f} s, or delete {self._storage.url}/{LOCK} to take over now"
            )

    @property
    def exists(self) -> bool:
        """Whether a process holds the lock, or was killed while it held it."""
        return _holder_of(self._storage) is not None

    def living_holder(self) -> Holder | None:
        """The process that holds the lock, as far as is known; None if there is none, or it has exited."""
        found = self._living()
        return None if found is None else found[0]

    def __enter__(self) -> StorageLock:
        self.check()
        self.holder = Holder.this_process()
        _write(self._storage, self.holder)
        self._released.clear()
        threading.Thread(target=self._beat, args=[self.holder], daemon=True, name="kdist-storage-lock").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        # Not worth a wait: the lock of a chief that has ended blocks nobody for long.
        storage = ObjectStorage(self._storage.url, timeout=0)
        try:
            if _holder_of(storage) == self.holder:
                storage.delete(LOCK)
        except StorageError as failure:
            warn(f"{failure}; a chief on another machine may start in {self._stale_secs:g} s")

    def _living(self) -> tuple[Holder, float] | None:
        """The process that holds the lock and is not known to have exited, and the seconds since its heartbeat."""
        holder = _holder_of(self._storage)
        if holder is None or holder.has_ended:
            return None
        # It may be released meanwhile.
        with suppress(NotThereError):
            written = self._storage.modified(LOCK).timestamp()
            age = max(0.0, time.time() + self._clock_is_behind - written)
            return (holder, age) if age < self._stale_secs else None
        return None

    @cached_property
    def _clock_is_behind(self) -> float:
        """Seconds by which this machine's clock is behind that of the storage."""
        probe = f"{LOCK}-{uuid.uuid4().hex}"
        self._storage.write(probe, b"")
        now = time.time()
        try:
            return self._storage.modified(probe).timestamp() - now
        finally:
            self._storage.delete(probe)

    def _beat(self, holder: Holder) -> None:
        """Writes the lock until it is released, or another chief has taken over."""
        # A failed attempt is not repeated: the next heartbeat is one.
        storage = ObjectStorage(self._storage.url, timeout=0)
        while not self._released.wait(self._heartbeat_secs):
            try:
                if _holder_of(storage) not in (holder, None):
                    return
                if not self._released.is_set():
                    _write(storage, holder)
            except StorageError:
                # Those who upload report it.
                continue


def check_not_taken_over(storage: ObjectStorage, holder: Holder | None) -> None:
    """Refuses to write to a run dir that has another chief than `holder` by now.

    Raises:
        ConfigError: names that chief.
        StorageError: the storage fails or refuses.
    """
    if (present := _holder_of(storage)) not in (holder, None):
        raise ConfigError(f"run.dir={storage.url}: was taken over by {present}; this run ends, and saves nothing more")


def _holder_of(storage: ObjectStorage) -> Holder | None:
    content = storage.read(LOCK)
    return None if content is None else holder_in(content)


def _write(storage: ObjectStorage, holder: Holder) -> None:
    storage.write(LOCK, json.dumps(asdict(holder)).encode())
