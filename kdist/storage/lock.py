"""`RunLock`: one chief for each run dir.

The file `.lock` names the process that has it. On the same machine, the operating system tells if that process still
runs. Elsewhere, its heartbeat does: it touches the file every few seconds, and whoever waits sees that the time of the
file changes. That time is never compared with a clock: those of two machines differ, and may be set meanwhile. So the
lock of a killed process blocks a chief on the same machine not at all, and one on another for a minute.

On a disk, taking the lock is atomic. On object storage it is not: of two chiefs that start in the same second, both
may. Then the second name stays, and the first chief ends before its next upload.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from kdist.errors import ConfigError
from kdist.log import warn
from kdist.storage.folder import Folder
from kdist.storage.object_storage import StorageError

LOCK = ".lock"
HEARTBEAT_SECS = 10.0
#: A lock without a heartbeat for that long is free.
STALE_SECS = 60.0
_POLL_SECS = 1.0

#: The last heartbeat of a lock that this process has seen, by its place: the owner, the time of the file, and when this
#: process saw it first, of `time.monotonic`.
_heard: dict[str, tuple[LockOwner, float, float]] = {}


@dataclass(frozen=True)
class LockOwner:
    """The process that has a lock; None stands for what the system does not tell.

    Attributes:
        started: its start in clock ticks since boot; a later process with the same number has another value.
        since: the time when it took the lock, for people to read.
        boot, namespace: the boot of its machine and the container in which its process id is valid.
        job, job_restarts: its Slurm job, and the number of times that the job had been requeued.
    """

    pid: int
    host: str
    started: int | None
    since: str
    boot: str | None = None
    namespace: str | None = None
    job: str | None = None
    job_restarts: int = 0

    @classmethod
    def this_process(cls) -> LockOwner:
        pid = os.getpid()
        since = datetime.now().isoformat(" ", "seconds")
        return cls(pid, socket.gethostname(), _start_of(pid), since, _boot_id(), _pid_namespace(), *_slurm_job())

    @property
    def is_elsewhere(self) -> bool:
        """True on another machine, or in another container: its process id is not valid here."""
        here = (socket.gethostname(), _boot_id(), _pid_namespace())
        return (self.host, self.boot, self.namespace) != here

    @property
    def has_ended(self) -> bool:
        """True if the process has certainly ended."""
        if self.is_elsewhere:
            # A job that was requeued has only its present processes, which may be on several machines.
            job, job_restarts = _slurm_job()
            return self.job is not None and self.job == job and self.job_restarts < job_restarts
        try:
            # A process of another user exists, too.
            with suppress(PermissionError):
                os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        start = _start_of(self.pid)
        return None not in (start, self.started) and start != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """While entered, this process is the only chief of a run dir, which is created if necessary.

    A lock of another machine counts as left behind when this process has looked at it for `stale_secs` and has seen no
    heartbeat.

    Raises:
        ConfigError: on entering: another process is its chief, or it is not writable.
        StorageError: it is at a URL whose storage fails or refuses.
    """

    def __init__(
        self, folder: Folder, *, heartbeat_secs: float = HEARTBEAT_SECS, stale_secs: float = STALE_SECS
    ) -> None:
        self._folder, self._heartbeat_secs, self._stale_secs = folder, heartbeat_secs, stale_secs
        self._released = threading.Event()

    def check(self) -> None:
        """Raises the `ConfigError` that entering would raise, and changes nothing.

        It waits for a heartbeat of a chief on another machine, at most `stale_secs`.
        """
        if (found := self.living()) is None:
            return
        owner, _ = found
        if not owner.is_elsewhere:
            raise self._in_use(owner)
        left = self._stale_secs - self._silent_secs(*found)
        warn(f"run.dir={self._folder}: was in use by {owner}; waiting for its heartbeat, at most {left:.0f} s")
        pause = min(_POLL_SECS, self._heartbeat_secs) if self._folder.looks_are_free else self._heartbeat_secs
        while (again := self.living()) is not None:
            if again != found:
                raise self._in_use(again[0])
            time.sleep(pause)

    @property
    def exists(self) -> bool:
        """True if a process has the lock, or was killed while it had it."""
        return _owner_of(self._folder) is not None

    def living(self) -> tuple[LockOwner, float] | None:
        """The process that has the lock and is not known to have exited, if any, and the time that its lock file has.

        Of a process on another machine, that takes looks for `stale_secs`.
        """
        owner = _owner_of(self._folder)
        # The lock may be released between two looks at it.
        if owner is None or owner.has_ended or (heartbeat_at := self._folder.modified(LOCK)) is None:
            return None
        is_silent = owner.is_elsewhere and self._silent_secs(owner, heartbeat_at) >= self._stale_secs
        return None if is_silent else (owner, heartbeat_at)

    def __enter__(self) -> RunLock:
        self.check()
        try:
            self._folder.make()
            with self._folder.alone(LOCK):
                # Another chief may have been faster.
                if (found := self.living()) is not None:
                    raise self._in_use(found[0])
                self._mine = LockOwner.this_process()
                self._content = json.dumps(asdict(self._mine)).encode()
                self._folder.write(LOCK, self._content)
        except OSError as error:
            # That of a run at a URL is on this machine, too.
            place = "" if str(self._folder) == str(self._folder.path) else f"{self._folder.path}: "
            why = error.strerror or error
            raise ConfigError(f"run.dir={self._folder}: {place}cannot be written: {why}") from error
        self._released.clear()
        threading.Thread(target=self._beat, daemon=True, name="kdist-run-lock").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        # Not worth a wait: the lock of a chief that has ended blocks nobody for long.
        folder = self._folder.without_retries()
        try:
            with suppress(OSError), folder.alone(LOCK):
                if _owner_of(folder) == self._mine:
                    folder.delete([LOCK])
        except StorageError as failure:
            warn(f"{failure}; a chief on another machine may start in {self._stale_secs:g} s")

    def _in_use(self, owner: LockOwner) -> ConfigError:
        is_own = not owner.is_elsewhere and owner.pid == os.getpid()
        who = f"this process itself on {owner.host}" if is_own else str(owner)
        takeover = ""
        if owner.is_elsewhere:
            takeover = (
                f"; if it is killed now, start again, which waits {self._stale_secs:.0f} s, or delete "
                f"{self._folder.place_of(LOCK)} to take over at once"
            )
        return ConfigError(
            f"run.dir={self._folder}: is in use by {who} since {owner.since}\n"
            f"  wait for it, or choose another run.dir{takeover}"
        )

    def _beat(self) -> None:
        """Touches the lock until it is released, or taken over by another chief."""
        folder = self._folder.without_retries()
        while not self._released.wait(self._heartbeat_secs):
            # Storage that is unavailable for a while gets the next heartbeat; saves report it.
            with suppress(OSError, StorageError):
                if _owner_of(folder) not in (self._mine, None):
                    return
                if not self._released.is_set():
                    folder.touch(LOCK, self._content)

    def _silent_secs(self, owner: LockOwner, heartbeat_at: float) -> float:
        """Seconds since this process has first seen the present heartbeat."""
        place, now = os.path.abspath(self._folder.place_of(LOCK)), time.monotonic()
        if (last := _heard.get(place)) is None or last[:2] != (owner, heartbeat_at):
            _heard[place] = last = owner, heartbeat_at, now
        return now - last[2]


def check_not_taken_over(folder: Folder) -> None:
    """Raises the `ConfigError` for a run dir that another chief took over while this one was suspended."""
    if (owner := _owner_of(folder)) is None:
        return
    # Host names may change while a process runs.
    if (owner.boot, owner.namespace, owner.pid) != (_boot_id(), _pid_namespace(), os.getpid()):
        raise ConfigError(
            f"run.dir={folder}: was taken over by {owner} at {owner.since}, perhaps after this run was suspended for "
            f"more than {STALE_SECS:g} s; this run stops without saving"
        )


def _owner_of(folder: Folder) -> LockOwner | None:
    """The process that the lock names; None without a lock, or if its process was killed before it had written."""
    with suppress(ValueError, TypeError):
        return LockOwner(**json.loads(folder.read(LOCK) or b""))
    return None


def _start_of(pid: int) -> int | None:
    """The start of a process, in clock ticks since boot; -1 if it has exited; None if the system does not tell."""
    with suppress(OSError):
        # The fields after the name, see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        # A zombie has exited; its parent has not waited for it yet.
        return -1 if fields[0] in "ZX" else int(fields[19])
    return None


def _slurm_job() -> tuple[str | None, int]:
    """The Slurm job of this process, if any, and the number of times that it was requeued."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return os.environ.get("SLURM_JOB_ID"), int(restarts) if restarts.isdecimal() else 0


def _boot_id() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return None


def _pid_namespace() -> str | None:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
