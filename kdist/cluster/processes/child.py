"""`Child`: a process that kdist has started. It ends with its parent, and sees its own devices only."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from kdist import forks
from kdist._compat import imports
from kdist.cluster.spec import Task
from kdist.errors import ClusterError

if TYPE_CHECKING:
    from kdist.config.schema import DevicesConfig

_PARENT_CHECK_SECS = 1.0
#: A killed process exits long before that; one that the kernel cannot end is not waited for any longer.
KILLED_SECS = 10.0
_LOG_LINES = 12
#: Begins the reason if the system has no memory or threads left for a process.
NOT_STARTED = "the process cannot be started"
#: The line of a log that tells why its process ended, where many lines of a stack follow it.
_FATAL = re.compile(
    r"^F\d{4} |: F |Check failed|^terminate called|bad_alloc|\bKilled\b|[Oo]ut of memory|\bOOM\b"
    "|Cannot allocate memory|Resource temporarily unavailable"
)
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
#: Settings of glibc, and that of memory in huge pages, where the system gives it to those that ask (madvise).
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Child:
    """A process that was started here, and that ends when its standard input closes.

    Args:
        start: starts it, with its log in place, as `subprocess.Popen` or an object with its methods.
        log: gets its messages, after earlier ones, which `log_tail` leaves out; None if they go elsewhere.
        start_timeout: seconds that it has until `has_started`; `deadline` is their end.
    """

    def __init__(self, start: Callable[[], Any], log: Path | None = None, start_timeout: float = math.inf) -> None:
        self.deadline = time.monotonic() + start_timeout
        self._log = log
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log_start = log.stat().st_size if log.exists() else 0
        self._process = start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdin(self) -> IO[Any]:
        return self._process.stdin

    @property
    def stdout(self) -> IO[Any]:
        return self._process.stdout

    def poll(self) -> int | None:
        return self._process.poll()

    def has_started(self) -> None:
        self.deadline = math.inf

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = KILLED_SECS) -> int:
        """Waits until it has exited; returns its exit code, or raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout)

    def end(self, deadline: float) -> None:
        """Kills it if it has not exited by then; its standard input is closed."""
        try:
            self.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            # If the kernel cannot end it, nobody can.
            with suppress(subprocess.TimeoutExpired):
                self.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def how_it_ended(self) -> str:
        """Waits for its end; `exit code 1`, or `signal 9, SIGKILL`."""
        return how_it_ended(self.wait())

    def log_tail(self) -> str:
        return "" if self._log is None else log_tail(self._log, self._log_start)


def start_child(
    command: Sequence[str],
    log: Path | None = None,
    *,
    prints_to_log: bool = False,
    start_timeout: float = math.inf,
    **options: Any,
) -> Child:
    """Starts a process that ends when its standard input closes, as with this process: see `end_with_parent`.

    It has its own session: Ctrl-C in a terminal goes to this process alone, which saves first. Signals that arrive
    before it ignores them wait until it does. `log` gets its standard error, and its output if it `prints_to_log`;
    without one, it shares this process's. Other `options` are those of `subprocess.Popen`.

    Raises:
        ClusterError: the system has no memory, or no processes, left for it.
    """

    def start() -> subprocess.Popen[Any]:
        with ExitStack() as files:
            if log is not None:
                options["stderr"] = files.enter_context(log.open("ab"))
                if prints_to_log:
                    options["stdout"] = options["stderr"]
            files.enter_context(forks.hold_back_signals())
            return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **options)

    try:
        child = Child(start, log, start_timeout)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        limits = "the limits of memory, processes and threads of this machine, user (ulimit -u) or container"
        raise ClusterError(f"{NOT_STARTED}: {error.strerror}; see {limits}") from error
    forks.keep_from_children(child.stdin)
    return child


def end_with_parent(name: str = "") -> None:
    """Lets this process exit when its standard input closes or its parent exits, and not on a signal.

    The kernel closes the pipe even after `kill -9` of the parent. A stopped process does not notice that; Linux kills
    it then. Schedulers send the signals that end a run to all of its processes at once: the parent saves what its
    children hold, and then ends them. On Linux, `top` shows `name`; it has at most 15 bytes.
    """

    def set_handlers(handler: Any) -> None:
        for number in forks.STOP_SIGNALS:
            signal.signal(number, handler)

    # Processes that the user's code starts here would inherit SIG_IGN: they could not be terminated.
    set_handlers(does_nothing)
    for number in forks.STOP_SIGNALS:
        signal.siginterrupt(number, False)
    forks.undo_in_children(lambda: set_handlers(signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forks.STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if name:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()


def pipe_of_signals() -> int:
    """Opens a pipe that gets a byte when a signal arrives, and returns its end to read.

    Python calls handlers in the main thread alone. If the system gives a signal to another thread, as it may, what the
    main thread waits in is not interrupted: let it wait for this pipe, too.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    return woken


def does_nothing(_number: int, _frame: FrameType | None) -> None:
    """Ignores a signal."""


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _PARENT_CHECK_SECS)
        if readable and not os.read(0, 1024):
            break
    forks.end_daemons()
    # A TensorFlow server cannot be stopped; exiting at once is its clean end, it holds nothing that must be written.
    os._exit(0)


def task_environment(task: Task, devices: DevicesConfig | None = None) -> dict[str, str]:
    """Makes the environment of a task's process, which may use some `devices`."""
    # The same kdist as here, installed or not.
    paths = [str(Path(__file__).resolve().parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = with_huge_pages(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # TF_CONFIG would describe another cluster; GRPC_FAIL_FAST=false would turn the loss of a server into a hang.
    for name in ("TF_CONFIG", "GRPC_FAIL_FAST"):
        environment.pop(name, None)
    # Errors are shown: why a server could not start is told by them alone.
    if environment.get(imports.LEVEL) not in ("0", "1"):
        environment[imports.LEVEL] = "2"
    if task.job in ("ps", "evaluator"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if (visible := visible_devices(task, devices)) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return environment


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Adds the setting by which glibc (2.35 and newer) asks for huge pages to an environment that does not have it.

    TensorFlow takes the memory of a tensor of more than 32 MB from the system in every step, and returns it. The system
    clears it page by page, which can take as long as all that is computed. See "Memory Allocation Tunables" in glibc's
    manual: a process has the setting from its start.
    """
    tunables = environment.get(_TUNABLES, "")
    if _HUGE_PAGES not in tunables:
        tunables = ":".join(filter(None, [tunables, f"{_HUGE_PAGES}=1"]))
    return {**environment, _TUNABLES: tunables}


def usable_cores() -> Sequence[int]:
    """The CPU cores on which this process may run: those of the machine where the system does not say."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def visible_devices(task: Task, devices: DevicesConfig | None) -> str | None:
    """The GPUs that a task may use, in the form of CUDA_VISIBLE_DEVICES; None if nothing is specified for its job."""
    chosen: Sequence[Any] | None = getattr(devices, task.job, None)
    if chosen is None:
        return None
    if chosen and isinstance(chosen[0], (list, tuple)):
        chosen = chosen[task.index] if task.index < len(chosen) else []
    return ",".join(map(str, chosen))


def end_children(children: Iterable[Child], timeout: float) -> None:
    """Ends processes by closing their standard input; kills a process that has not exited after `timeout` seconds."""
    children = list(children)
    for child in children:
        # It may have died with something unread.
        with suppress(BrokenPipeError):
            child.stdin.close()
    deadline = time.monotonic() + timeout
    for child in children:
        child.end(deadline)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    names = [f", {number.name}" for number in signal.Signals if number == -code]
    return f"signal {-code}{''.join(names)}"


def ended_by_itself(how: str) -> bool:
    """Tells from `how_it_ended` whether a process exited, or crashed, and was not killed by another one."""
    return "exit code" in how or any(number.name in how for number in _CRASHES)


def log_tail(log: Path, start: int = 0) -> str:
    """The end of an error message: where a log is, its first fatal line, and its last lines, from byte `start` on."""
    lines: list[str] = []
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    last, before = lines[-_LOG_LINES:], lines[:-_LOG_LINES]
    # What is in the last lines is seen there.
    fatal = [] if any(map(_FATAL.search, last)) else list(filter(_FATAL.search, before))[:1]
    what = "the fatal line and the last ones follow" if fatal else "last lines follow" if last else "empty"
    return "\n".join([f"\n  log: {log} ({what})", *fatal, *(["..."] if fatal else []), *last])
