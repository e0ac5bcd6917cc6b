"""What all processes that kdist starts have in common: they end with their parent, and see their devices only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, Protocol

from kdist import forks
from kdist._compat import quiet_import
from kdist.cluster.processes import watchdog
from kdist.cluster.spec import Task

if TYPE_CHECKING:
    from kdist.config.schema import DevicesConfig

_PARENT_CHECK_SECS = 1.0
#: A killed process exits long before that; one that the kernel cannot end is not waited for any longer.
KILLED_SECS = 10.0
_LOG_LINES = 12
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that calls `end_with_parent`.

    It has a session of its own: Ctrl-C in a terminal goes to this process alone, which saves first. Signals that arrive
        before it ignores them wait until it does.
    """
    with forks.signals_held_back():
        process: subprocess.Popen[Any] = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, **options
        )
    assert process.stdin is not None
    forks.keep_from_children(process.stdin)
    return process


@contextmanager
def killed_after(secs: float, text: str) -> Iterator[None]:
    """Kills this process if the block takes longer than `secs`; prints `text` first.

    Only for calls that hold Python's lock while they wait, where nothing else can end them.
    """
    command = [sys.executable, "-S", watchdog.__file__, "limit", str(secs), text]
    watcher = start_child(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        end_children([watcher], KILLED_SECS)


def end_with_parent(ignored: Collection[signal.Signals] = forks.STOP_SIGNALS) -> None:
    """From now on this process exits when its standard input closes or its parent exits, and not on a signal.

    The kernel closes the pipe even after `kill -9` of the parent. A stopped process does not notice that; Linux kills
    it then. Schedulers send the signals that end a run to all of its processes at once: the parent saves what its
    children hold, and then ends them.
    """
    for number in ignored:
        # Processes that the user's code starts here would inherit SIG_IGN: they could not be terminated.
        signal.signal(number, does_nothing)
        signal.siginterrupt(number, False)
    forks.undo_in_children(lambda: _set_handlers(ignored, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forks.STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()


def does_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handles a signal that this process ignores."""


def _set_handlers(numbers: Collection[signal.Signals], handler: signal.Handlers) -> None:
    for number in numbers:
        signal.signal(number, handler)


def name_process(name: str) -> None:
    """Gives this process the name that `top` shows, on Linux; at most 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _PARENT_CHECK_SECS)
        if readable and not os.read(0, 1024):
            break
    forks.end_daemons()
    # A TensorFlow server cannot be stopped; exiting at once is its clean end, it holds nothing that must be written.
    os._exit(0)


def task_environment(task: Task, devices: DevicesConfig | None = None) -> dict[str, str]:
    """The environment of a task's process.

    Args:
        devices: which GPUs tasks may use.
    """
    environment = _environment_with_kdist()
    # TF_CONFIG would describe another cluster; GRPC_FAIL_FAST=false would turn the loss of a server into a hang.
    for name in ("TF_CONFIG", "GRPC_FAIL_FAST"):
        environment.pop(name, None)
    # Errors are shown: why a server could not start is told by them alone.
    if environment.get(quiet_import.LEVEL) not in ("0", "1"):
        environment[quiet_import.LEVEL] = "2"
    if task.job in ("ps", "evaluator"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if (visible := visible_devices(task, devices)) is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return environment


def _environment_with_kdist() -> dict[str, str]:
    """The environment of a process that uses the same kdist as this one, installed or not."""
    paths = [
        str(Path(__file__).resolve().parents[3]),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def visible_devices(task: Task, devices: DevicesConfig | None) -> str | None:
    """The GPUs that a task may use, in the form of CUDA_VISIBLE_DEVICES; None if nothing is specified for its job."""
    chosen: Sequence[Any] | None = getattr(devices, task.job, None)
    if chosen is None:
        return None
    if chosen and isinstance(chosen[0], (list, tuple)):
        chosen = chosen[task.index] if task.index < len(chosen) else []
    return ",".join(map(str, chosen))


class Process(Protocol):
    """What ending a process needs of `subprocess.Popen`."""

    @property
    def stdin(self) -> IO[Any] | None: ...
    @property
    def stdout(self) -> IO[Any] | None: ...
    def wait(self, timeout: float = ...) -> int: ...
    def kill(self) -> None: ...


def end_children(processes: Iterable[Process], timeout: float) -> None:
    """Closes the standard input of processes that end with it, and kills what is left after `timeout` seconds."""
    processes = list(processes)
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILLED_SECS)
        if process.stdout is not None:
            process.stdout.close()


def how_it_ended(code: int) -> str:
    """`exit code 1`, or `signal 9, SIGKILL`."""
    if code < 0:
        try:
            return f"signal {-code}, {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def ended_by_itself(how: str) -> bool:
    """Whether a process exited, or crashed, rather than being killed by another one: from what `how_it_ended` says."""
    return "exit code" in how or any(number.name in how for number in _CRASHES)


def last_lines(log: Path, start: int = 0) -> str:
    """The last lines of a log, of those from byte `start` on; empty if there is no such file."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-_LOG_LINES:])


def log_tail(log: Path, start: int = 0) -> str:
    """The end of an error message: where the log is, and its last lines."""
    tail = last_lines(log, start)
    return f"\n  log: {log}" + (f" (last lines follow)\n{tail}" if tail else " (empty)")
