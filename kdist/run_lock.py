"""`RunLock`: one chief for each run dir.

The file `.lock` says which process holds it. Whether that process is still there is asked of the operating system, so
that a lock whose process was killed keeps nobody out.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType

from kdist.errors import ConfigError
from kdist.folders import make_private


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        pid, host: which process it is.
        started: when it started, in clock ticks since the machine did; a later process with its number has another.
            None where the system does not say.
        since: when it took the lock, for people to read.
    """

    pid: int
    host: str
    started: int | None
    since: str

    @classmethod
    def this_process(cls) -> Holder:
        pid = os.getpid()
        return cls(pid, socket.gethostname(), _start_of(pid), datetime.now().isoformat(" ", "seconds"))

    @property
    def is_elsewhere(self) -> bool:
        return self.host != socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether the process has certainly ended."""
        if self.is_elsewhere:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            # It is somebody else's, and there.
            pass
        start = _start_of(self.pid)
        return None not in (start, self.started) and start != self.started


class RunLock:
    """While entered, this process is the one chief of a run dir, which is made if it is not there.

    Args:
        folder: the run dir.

    Raises:
        ConfigError: on entering: another process is its chief, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        self._mine: Holder | None = None

    def check(self) -> None:
        """Refuses what entering would refuse, and changes nothing.

        Raises:
            ConfigError: another process is the chief.
        """
        with suppress(OSError):
            self._refuse_if_held(self._path.read_text())

    def holder(self) -> Holder | None:
        """The process that the lock file names, which may be gone; None if there is none."""
        try:
            return _holder(self._path.read_text())
        except OSError:
            return None

    def __enter__(self) -> RunLock:
        try:
            make_private(self._folder)
            with _opened_alone(self._path) as descriptor:
                self._refuse_if_held(os.read(descriptor, 4096).decode(errors="replace"))
                mine = Holder.this_process()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(mine)).encode(), 0)
        except OSError as error:
            raise ConfigError(f"run.dir={self._folder}: cannot be written: {error.strerror or error}") from error
        self._mine = mine
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError), _opened_alone(self._path) as descriptor:
            if _holder(os.read(descriptor, 4096).decode(errors="replace")) == self._mine:
                self._path.unlink()

    def _refuse_if_held(self, content: str) -> None:
        holder = _holder(content)
        if holder is None or holder.is_gone:
            return
        who = "this process itself" if holder.pid == os.getpid() else f"process {holder.pid}"
        message = f"run.dir={self._folder}: is in use by {who} on {holder.host} since {holder.since}\n"
        if holder.is_elsewhere:
            message += f"  if that is gone, remove {self._path}; else wait for it, or choose another run.dir"
        else:
            message += "  wait for it, or choose another run.dir"
        raise ConfigError(message)


def _holder(content: str) -> Holder | None:
    """Whom a lock file names; None if nobody, as when its process was killed before it had written it."""
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


@contextmanager
def _opened_alone(path: Path) -> Iterator[int]:
    """A descriptor of the file at `path`, made if need be, that no other process has opened so at the same time."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # Some network file systems have no locks; there two chiefs must not start in the same millisecond.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`, and was not removed before it could be locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did, -1 if it has ended; None if nobody says."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie has ended; only its parent has not asked after it.
    return -1 if state in "ZX" else int(fields[18])
