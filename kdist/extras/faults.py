"""Fault injection: hooks that inject a fault, so that a cluster can be tested before it is trusted.

The faults are real: use them in runs that have no other purpose, such as `python -m kdist +recipe=mnist cluster=2ps2w
+drill=kill_worker drill.at_step=200`. After the practice known as game days or chaos engineering.
"""

from __future__ import annotations

import abc
import inspect
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from kdist.cluster.processes.child import Child, end_children, start_child
from kdist.config.checks import check_one_of, check_whole_number
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, RunContext, RunValues, Session

_CHUNK = bytes(1 << 20)


class Drill(Hook, abc.ABC):
    """Injects a fault once, at the first run that ends at a global step or later. Base class of all faults.

    Args:
        at_step: the global step.
    """

    def __init__(self, at_step: int) -> None:
        check_whole_number("drill.at_step", at_step)
        self._at_step = at_step

    def begin(self, session: Session) -> None:
        self._is_done = False

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if not self._is_done and values.global_step >= self._at_step:
            self._is_done = True
            context.session.print_line(f"drill | step {values.global_step:>6} | {self.inject(context.session)}")

    @abc.abstractmethod
    def inject(self, session: Session) -> str:
        """Injects the fault; returns a short description."""

    def due_in(self, step: int) -> int | None:
        return None if self._is_done else max(1, self._at_step - step)


class SignalTask(Drill):
    """Kills or stops a task.

    Args:
        task: for example `worker:1` or `ps:0`; this process must have started it.
        number: `KILL`, or `STOP`: it exists, but no longer runs.
    """

    def __init__(self, at_step: int, task: str, number: str = "KILL") -> None:
        super().__init__(at_step)
        self._task = task
        check_one_of("drill.number", number, ("KILL", "STOP"))
        self._signal = signal.Signals[f"SIG{number}"]

    def inject(self, session: Session) -> str:
        os.kill(_pid_of(session, self._task), self._signal)
        return f"{self._signal.name} to {self._task}"


class SlowTask(Drill):
    """Slows a task down from then on: it is stopped most of the time.

    Args:
        task: for example `worker:1`; this process must have started it.
        factor: how many times slower; more than 1.
    """

    def __init__(self, at_step: int, task: str, factor: float = 5.0) -> None:
        super().__init__(at_step)
        if not factor > 1:
            raise ConfigError(f"drill.factor={factor}: must be more than 1")
        self._task = task
        self._factor = factor
        self._slowing: Child | None = None

    def inject(self, session: Session) -> str:
        # Not a thread: while TensorFlow waits for the stopped task, no thread of this process may run.
        arguments = [str(_pid_of(session, self._task)), str(self._factor)]
        self._slowing = start_child([sys.executable, "-S", "-c", _SLOWING, *arguments])
        return f"{self._task} is {self._factor:g} times slower"

    def close(self) -> None:
        if self._slowing is not None:
            end_children([self._slowing], 2.0)
            self._slowing = None


class FillDisk(Drill):
    """Fills the file system of the run dir for a while.

    Args:
        secs: until it is freed again; null: at the end.
        max_bytes: a file system with more free space is left alone.
    """

    def __init__(self, at_step: int, secs: float | None = None, max_bytes: int = 1 << 30) -> None:
        super().__init__(at_step)
        self._secs = secs
        self._max_bytes = max_bytes
        self._file: Path | None = None

    def inject(self, session: Session) -> str:
        folder = session.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free > self._max_bytes:
            raise ConfigError(
                f"drill.max_bytes={self._max_bytes}: {free} bytes are free where {folder} is; use a small file system "
                "for run.dir, as a tmpfs"
            )
        self._file = folder.parent / "filled-by-drill"
        with self._file.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(_CHUNK):
                pass
        if self._secs is not None:
            timer = threading.Timer(self._secs, self.close)
            timer.daemon = True
            timer.start()
        return f"the file system of {folder} is full"

    def close(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class DamageCheckpoint(Drill):
    """Damages the newest checkpoint: inverts bytes in the middle of its data."""

    def inject(self, session: Session) -> str:
        newest = session.checkpoints.newest()
        if newest is None:
            raise ConfigError(f"drill: at step {session.global_step} there is no checkpoint to damage")
        data = max(newest.parent.glob(f"{newest.name}.data-*"), key=lambda path: path.stat().st_size)
        content = bytearray(data.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
        data.write_bytes(content)
        return f"{data.name} is damaged"


def slow_down(pid: int, factor: float) -> None:
    """Lets `pid` run for one time slice in `factor` until standard input closes, and then at full speed again."""
    import os
    import select
    import signal

    slice_secs = 0.02
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            is_over = bool(select.select([0], [], [], (factor - 1) * slice_secs)[0])
            os.kill(pid, signal.SIGCONT)
            if is_over or select.select([0], [], [], slice_secs)[0]:
                return
    except ProcessLookupError:
        # It has exited; the process that replaces it runs at full speed.
        return


#: The program of a process that slows another one down, which imports nothing of kdist.
_SLOWING = f"import sys\n{inspect.getsource(slow_down)}\nslow_down(int(sys.argv[1]), float(sys.argv[2]))\n"


def _pid_of(session: Session, name: str) -> int:
    pids = {str(task): pid for task, pid in session.strategy.pids.items()}
    if name not in pids:
        have = ", ".join(pids) or "none: the tasks of this cluster are not started by the chief"
        raise ConfigError(f"drill.task={name}: there is no such task to send a signal to; there are {have}")
    return pids[name]
