"""`RunLock`: one chief for each run dir.

The file `.lock` names the process that holds it. On the same machine, the operating system tells whether that process
still runs. Elsewhere, its heartbeat does: it touches the file every few seconds. So the lock of a killed process blocks
a chief on the same machine not at all, and others for at most a minute.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType

from kdist.errors import ConfigError
from kdist.log import warn
from kdist.storage.files import make_private

HEARTBEAT_SECS = 10.0
#: A lock without a heartbeat for that long is free.
STALE_SECS = 60.0
_NAME = ".lock"
_POLL_SECS = 1.0


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        pid, host: which process it is.
        started: in clock ticks since boot; a later process with the same number has another value.
        since: when it took the lock, for people to read.
        boot, namespace: the boot of its machine and the container in which its process id is valid.
        job, job_restarts: the Slurm job that it is part of, and how often that had been requeued.

    What the system does not tell is None.
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
    def this_process(cls) -> Holder:
        pid = os.getpid()
        since = datetime.now().isoformat(" ", "seconds")
        return cls(pid, socket.gethostname(), _start_of(pid), since, _boot_id(), _pid_namespace(), *_slurm_job())

    @property
    def is_elsewhere(self) -> bool:
        """Whether its process id is not valid here: it is on another machine, or in another container."""
        here = (socket.gethostname(), _boot_id(), _pid_namespace())
        return (self.host, self.boot, self.namespace) != here

    @property
    def has_ended(self) -> bool:
        """Whether the process has certainly ended."""
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

    Args:
        folder: the run dir.
        url: where the run dir is, if `folder` is where its chief works.
        heartbeat_secs: seconds between heartbeats.
        stale_secs: seconds without one after which a lock of another machine counts as left behind.

    Raises:
        ConfigError: on entering: another process is its chief, or it is not writable.
    """

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        *,
        heartbeat_secs: float = HEARTBEAT_SECS,
        stale_secs: float = STALE_SECS,
    ) -> None:
        self._folder = folder
        self._name = url or folder
        self._path = folder / _NAME
        self._heartbeat_secs = heartbeat_secs
        self._stale_secs = stale_secs
        self._mine: Holder | None = None
        self._released = threading.Event()

    def check(self) -> None:
        """Raises the `ConfigError` that entering would raise for another chief, without changing anything."""
        self._wait_for_heartbeat()

    @property
    def exists(self) -> bool:
        """Whether a process holds the lock, or was killed while it held it."""
        return _read(self._path) is not None

    def living_holder(self) -> Holder | None:
        """The process that holds the lock, as far as is known; None if there is none, or it has exited."""
        if (found := _read(self._path)) is None:
            return None
        holder, heartbeat_at = found
        if holder.has_ended or (holder.is_elsewhere and self._age(heartbeat_at) >= self._stale_secs):
            return None
        return holder

    def __enter__(self) -> RunLock:
        self._wait_for_heartbeat()
        try:
            make_private(self._folder)
            with _opened_alone(self._path) as descriptor:
                # Another chief may have been faster.
                if (holder := self.living_holder()) is not None:
                    raise self._in_use(holder)
                mine = Holder.this_process()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(mine)).encode(), 0)
        except OSError as error:
            raise ConfigError(f"run.dir={self._folder}: cannot be written: {error.strerror or error}") from error
        self._mine = mine
        self._released.clear()
        threading.Thread(target=self._beat, daemon=True, name="kdist-run-lock").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        with suppress(OSError), _opened_alone(self._path) as descriptor:
            if holder_in(os.read(descriptor, 4096)) == self._mine:
                self._path.unlink()

    def _wait_for_heartbeat(self) -> None:
        """Returns when no chief holds the lock, else raises ConfigError; elsewhere, the heartbeat decides."""
        if (holder := self.living_holder()) is None:
            return
        if not holder.is_elsewhere:
            raise self._in_use(holder)
        first = _read(self._path)
        left = self._stale_secs if first is None else self._stale_secs - self._age(first[1])
        warn(
            f"run.dir={self._name}: was in use by {holder} a moment ago; waiting for its heartbeat, "
            f"at most {left:.0f} s"
        )
        deadline = time.monotonic() + self._stale_secs
        while (holder := self.living_holder()) is not None:
            # A clock that is wrong by a minute must not make this wait forever.
            if _read(self._path) != first or time.monotonic() > deadline:
                raise self._in_use(holder)
            time.sleep(min(_POLL_SECS, self._heartbeat_secs))

    def _in_use(self, holder: Holder) -> ConfigError:
        is_own = not holder.is_elsewhere and holder.pid == os.getpid()
        who = f"this process itself on {holder.host}" if is_own else str(holder)
        return ConfigError(
            f"run.dir={self._name}: is in use by {who} since {holder.since}\n  wait for it, or choose another run.dir"
        )

    def _beat(self) -> None:
        """Touches the lock until it is released, or taken over by another chief."""
        while not self._released.wait(self._heartbeat_secs):
            # A file system that is unavailable for a while gets the next heartbeat.
            with suppress(OSError), self._path.open("rb") as file:
                if holder_in(file.read(4096)) != self._mine:
                    return
                os.utime(file.fileno())

    def _age(self, heartbeat_at: float) -> float:
        return time.time() + self._clock_is_behind - heartbeat_at

    @cached_property
    def _clock_is_behind(self) -> float:
        """Seconds by which this machine's clock is behind that of the file system, which may be another machine's."""
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=self._folder, prefix=_NAME) as file:
            return os.fstat(file.fileno()).st_mtime - time.time()
        return 0.0


def check_not_taken_over(folder: Path) -> None:
    """Refuses to write to a run dir that another chief took over while this one was suspended.

    Raises:
        ConfigError: names that chief.
    """
    if (found := _read(folder / _NAME)) is None:
        return
    holder, _ = found
    here = (_boot_id(), _pid_namespace())
    # The chief may be a child of the holder, or of one of its fork servers. Host names may change while a process runs.
    own = (os.getpid(), os.getppid(), _parent_of(os.getppid()))
    if (holder.boot, holder.namespace) != here or holder.pid not in own:
        raise ConfigError(
            f"run.dir={folder}: was taken over by {holder} at {holder.since}: this run gave no heartbeat for "
            f"{STALE_SECS:g} s; it ends, and saves nothing more"
        )


def _read(path: Path) -> tuple[Holder, float] | None:
    """The process that a lock file names, and when it was last touched; None without a file or a name."""
    # Opened each time: network file systems show changes to a process that opens a file.
    with suppress(OSError), path.open("rb") as file:
        if (holder := holder_in(file.read(4096))) is not None:
            return holder, os.fstat(file.fileno()).st_mtime
    return None


def holder_in(content: bytes) -> Holder | None:
    """The process that a lock file names; None if its process was killed before it had written its name."""
    with suppress(ValueError, TypeError):
        return Holder(**json.loads(content))
    return None


@contextmanager
def _opened_alone(path: Path) -> Iterator[int]:
    """A descriptor of the file at `path`, created if necessary, that one process has at a time."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Some network file systems have no locks; there, two chiefs must not start in the same millisecond.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`, and was not removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; -1 if it has exited."""
    if (fields := _stat_of(pid)) is None:
        return None
    # A zombie has exited; its parent has not waited for it yet.
    return -1 if fields[0] in "ZX" else int(fields[19])


def _parent_of(pid: int) -> int | None:
    """The process id of a process's parent."""
    fields = _stat_of(pid)
    return None if fields is None else int(fields[1])


def _stat_of(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` after the name, see proc(5); None if the system has none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _slurm_job() -> tuple[str | None, int]:
    """The Slurm job that this process is part of, if any, and how often it was requeued."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return os.environ.get("SLURM_JOB_ID"), int(restarts) if restarts.isdecimal() else 0


def _boot_id() -> str | None:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _pid_namespace() -> str | None:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None
