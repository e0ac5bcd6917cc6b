"""`LocalCluster`: every parameter server and worker as a process of this machine."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from kdist._compat import op_libraries
from kdist.cluster.network.sockets import HeldPorts, bound_to
from kdist.cluster.processes import watchdog
from kdist.cluster.processes.child import Child, end_children, start_child, task_environment
from kdist.cluster.processes.forkserver import TaskProgram
from kdist.cluster.processes.server import READY, ServerOptions
from kdist.cluster.processes.task_processes import TaskProcesses
from kdist.cluster.spec import ClusterShape, ClusterSpec, Task
from kdist.config.schema import ClusterConfig, DevicesConfig
from kdist.errors import ClusterError

_START_ATTEMPTS = 3
_STOP_SECS = 2.0
# The chief finds most stopped tasks itself, within 10 s after `cluster.step_timeout` at most, and says so.
_GUARD_EXTRA_SECS = 20.0


def available_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_budget(job: str, shape: ClusterShape, cores: int) -> tuple[int, int]:
    """Threads (intra-op, inter-op) of one task, so that all tasks together fit `cores`.

    Workers compute and share the cores; parameter servers mostly move memory. With fewer than two inter-op threads, a
    step that waits for another task could block that task.
    """
    share = max(1, cores // shape.num_workers) if job == "worker" else 1
    return share, max(2, 2 * share)


def cores_of(task: Task, shape: ClusterShape, cores: Sequence[int]) -> list[int] | None:
    """The cores that a task is bound to; None if there are enough for the system to choose well.

    A step passes through dozens of threads, most of which wait for the previous one. If there is at most one core per
    worker, waking a thread on another core costs more than the work of the thread.
    """
    if len(cores) > shape.num_workers:
        return None
    return [cores[task.index % len(cores)]]


def own_cores_of(task: Task, shape: ClusterShape) -> list[int] | None:
    """`cores_of`, of those that this process may use; None where the system cannot bind a process."""
    return cores_of(task, shape, sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def log_path(log_dir: Path, task: Task) -> Path:
    """The log file of a task."""
    return log_dir / f"{task.job}-{task.index}.log"


class LocalCluster:
    """Starts the tasks of `shape` on free ports of this machine; they end with this process.

    Each task's output goes to `<log_dir>/<job>-<index>.log`. A task ends when its standard input closes, so it cannot
    outlive this process (see `kdist.cluster.processes.server`). Use as a context manager, or `start` and `stop`.

    Args:
        shape: how many parameter servers and workers.
        log_dir: folder for the logs; made if missing.
        start_timeout: seconds within which every task must serve.
        step_timeout: seconds for which a task may be stopped (SIGSTOP) before it is killed, a few seconds later; the
            chief may be waiting for it where it cannot watch it.
        devices: which GPUs tasks may use.

    Raises:
        ClusterError: on `start`; names the task that died or did not respond, with the end of its log.
    """

    def __init__(
        self,
        shape: ClusterShape,
        log_dir: Path,
        *,
        start_timeout: float = ClusterConfig.start_timeout,
        step_timeout: float = ClusterConfig.step_timeout,
        devices: DevicesConfig | None = None,
    ) -> None:
        self.shape = shape
        self._devices = devices
        self.log_dir = log_dir
        self._start_timeout = start_timeout
        self._guard_secs = step_timeout + _GUARD_EXTRA_SECS
        self._guard: Child | None = None
        #: Process ids of tasks that were killed because they were stopped.
        self._were_stopped: set[int] = set()
        self._children: dict[Task, Child] = {}
        # Messages from before the first task is forked are in its log.
        self._task_processes = TaskProcesses(self._log_path(shape.tasks[0]))
        self._ready: set[Task] = set()
        #: Tasks that were restarted and do not serve yet.
        self._starting: set[Task] = set()
        self._ports = HeldPorts(0)
        self.spec = ClusterSpec((), ())
        self.chief_address = ""
        self.any_chief_port = True

    def launch(self) -> None:
        """Starts the processes and returns at once; `wait` waits until they serve."""
        self._ready.clear()
        self._ports.release()
        self._ports = HeldPorts(len(self.shape.tasks) + 1)
        *free, for_chief = self._ports.numbers
        self.chief_address = f"127.0.0.1:{for_chief}"
        ports = [f"127.0.0.1:{port}" for port in free]
        self.spec = ClusterSpec(tuple(ports[: self.shape.num_ps]), tuple(ports[self.shape.num_ps :]))
        self._children = {task: self._launch(task) for task in self.shape.tasks}

    def wait(self) -> None:
        """Waits until every task serves; starts all of them again if a port was taken in the meantime."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._wait_until_ready()
                self._watch_over(self.shape.tasks)
                return
            except ClusterError:
                port_taken = any("Address already in use" in child.last_lines() for child in self._children.values())
                self.stop()
                if attempt == _START_ATTEMPTS or not port_taken:
                    raise
                self.launch()

    def start(self) -> LocalCluster:
        self.launch()
        self.wait()
        return self

    def stop(self, *, will_resume: bool = False) -> None:
        """Stops every task and waits for it, at most a few seconds. May be called repeatedly."""
        end_children(self._children.values(), _STOP_SECS)
        self._children.clear()
        self._starting.clear()
        if self._guard is not None:
            end_children([self._guard], _STOP_SECS)
            self._guard = None
        self._task_processes.close()
        self._ports.release()

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        """Kills tasks, all if None, and waits until they have exited; `stop` has to be called all the same."""
        for task in self._children if tasks is None else tasks:
            self._children[task].kill()
            self._children[task].wait()
        return True

    def restart(self, task: Task) -> bool:
        """Restarts a task that has exited, at its old address, and returns at once."""
        end_children([self._children[task]], _STOP_SECS)
        self._children[task] = self._launch(task)
        self._ready.discard(task)
        self._starting.add(task)
        return True

    def silent_tasks(self) -> set[Task]:
        """None: a process of this machine runs, or has exited."""
        return set()

    def disconnect(self, task: Task) -> None:
        """Does nothing: the system closes the connections of a process that has exited."""

    def reconnect(self, task: Task) -> None:
        """Nothing."""

    def starting_tasks(self) -> set[Task]:
        """The tasks that were restarted and do not serve yet; one that takes too long is killed."""
        for task in list(self._starting):
            child = self._children[task]
            if child.poll() is None and child.is_late:
                child.kill()
            # A process that has exited is among the lost ones.
            if child.poll() is not None:
                self._starting.discard(task)
            elif _can_read(child.stdout):
                self._starting.discard(task)
                # Not before: a task that is not forked yet has no process id of its own.
                self._watch_over([task])
        return set(self._starting)

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pids(self) -> dict[Task, int]:
        """The process id of each task."""
        return {task: child.pid for task, child in self._children.items()}

    def lost_tasks(self) -> dict[Task, str]:
        """The tasks that have exited, and how."""
        ended = {task: child for task, child in self._children.items() if child.poll() is not None}
        lost = {task: f"died ({child.how_it_ended()})" for task, child in ended.items()}
        if lost and self._guard is not None and _can_read(self._guard.stdout):
            self._were_stopped |= {int(pid) for pid in os.read(self._guard.stdout.fileno(), 1 << 16).split()}
        for task in lost:
            if self._children[task].pid in self._were_stopped:
                lost[task] = f"was stopped for {self._guard_secs:g} s and killed"
        return lost

    def _watch_over(self, tasks: Sequence[Task]) -> None:
        """Starts to watch tasks that may be stopped for too long; see `kdist.cluster.processes.watchdog`."""
        if sys.platform != "linux":
            return
        if self._guard is None:
            self._guard = start_child(
                [sys.executable, "-S", watchdog.__file__, "stopped", str(self._guard_secs)], stdout=subprocess.PIPE
            )
        # The watchdog may be killed like any process; the tasks do not need it.
        with suppress(BrokenPipeError):
            self._guard.stdin.write("".join(f"{self._children[task].pid}\n" for task in tasks).encode())
            self._guard.stdin.flush()

    def _log_path(self, task: Task) -> Path:
        return log_path(self.log_dir, task)

    def _options(self, task: Task) -> ServerOptions:
        intra_op, inter_op = thread_budget(task.job, self.shape, available_cores())
        own_cores = own_cores_of(task, self.shape)
        return ServerOptions(
            self.spec.jobs,
            task.job,
            task.index,
            intra_op,
            inter_op,
            own_cores,
            bind=bound_to(),
            op_libraries=op_libraries.loaded_by(),
            path=sys.path,
        )

    def _launch(self, task: Task) -> Child:
        options, environment, log = self._options(task), task_environment(task, self._devices), self._log_path(task)
        program = TaskProgram("kdist.cluster.processes.server", options.to_json(), environment, log)
        return self._task_processes.start(program, self._start_timeout)

    def _wait_until_ready(self) -> None:
        with selectors.DefaultSelector() as selector:
            for task, child in self._children.items():
                if task not in self._ready:
                    selector.register(child.stdout, selectors.EVENT_READ, task)
            waiting = {key.data for key in selector.get_map().values()}
            deadline = min(child.deadline for child in self._children.values())
            while waiting:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    names = ", ".join(sorted(map(str, waiting)))
                    raise ClusterError(
                        f"{names} did not respond within {self._start_timeout:g} s (cluster.start_timeout)"
                        + self._children[min(waiting, key=str)].log_tail()
                    )
                for key, _ in events:
                    task = key.data
                    if task not in waiting:
                        continue
                    if os.read(key.fd, len(READY)) != READY:
                        child = self._children[task]
                        raise ClusterError(f"{task} exited while starting ({child.how_it_ended()})" + child.log_tail())
                    self._ready.add(task)
                    waiting.discard(task)


def _can_read(pipe: IO[bytes]) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        return bool(selector.select(0.0))
