"""`LocalCluster`: every parameter server and worker as a process of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import connection
from pathlib import Path

from kdist.cluster.network.sockets import bind_to, held_ports
from kdist.cluster.processes import watchdog
from kdist.cluster.processes.child import Child, end_children, start_child, task_environment, usable_cores
from kdist.cluster.processes.forkserver import TaskProgram, fork_server, start_task
from kdist.cluster.processes.server import LEAVES, READY, TaskOptions
from kdist.cluster.spec import Cluster, ClusterShape, ClusterSpec, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ClusterError
from kdist.log import warn

_START_ATTEMPTS = 3
_STOP_SECS = 2.0
# The chief finds most stopped tasks itself, within 10 s after `cluster.step_timeout` at most, and says so.
_GUARD_EXTRA_SECS = 20.0


def share_of_machine(
    task: Task, shape: ClusterShape, cores: Sequence[int] | None = None
) -> tuple[int, int, list[int] | None]:
    """The threads of a task (intra-op, inter-op), so that all tasks fit `cores`, and those that it is bound to, if any.

    Workers compute and share the cores; parameter servers mostly move memory. With fewer than two inter-op threads, a
    step that waits for another task could block that task. A step passes through dozens of threads, most of which wait
    for the previous one: if there is at most one core per worker, waking a thread on another core costs more than the
    work of the thread. `cores` of None are those that this process may use.
    """
    cores = cores or usable_cores()
    share = max(1, len(cores) // shape.num_workers) if task.job == "worker" else 1
    is_bound = sys.platform == "linux" and len(cores) <= shape.num_workers
    return share, max(2, 2 * share), [cores[task.index % len(cores)]] if is_bound else None


def log_path(log_dir: Path, task: Task) -> Path:
    return log_dir / f"{task.job}-{task.index}.log"


class LocalCluster(Cluster):
    """Starts the tasks of `shape` on free ports of this machine; they end with this process.

    Each task's output goes to `<log_dir>/<job>-<index>.log`. A task ends when its standard input closes, so it cannot
    outlive this process (see `kdist.cluster.processes.server`). A task that is stopped (SIGSTOP) for longer than
    `cluster.step_timeout` is killed, a few seconds later: the chief may be waiting for it where it cannot watch it.
    """

    def __init__(self, shape: ClusterShape, log_dir: Path, config: ClusterConfig | None = None) -> None:
        self.shape, self.log_dir, self._config = shape, log_dir, config or ClusterConfig()
        self.spec = ClusterSpec((), ())
        self._children: dict[Task, Child] = {}
        #: Tasks that were restarted and do not serve yet.
        self._starting: set[Task] = set()
        #: The addresses of tasks that are to join.
        self._joining: dict[Task, str] = {}
        self._guard: Child | None = None
        self._guard_secs = self._config.step_timeout + _GUARD_EXTRA_SECS
        #: Process ids of tasks that were killed because they were stopped.
        self._were_stopped: set[int] = set()
        self._at_end = ExitStack()

    def launch(self) -> None:
        bind_to(self._config.bind, all_here=True)
        *free, for_chief = self._at_end.enter_context(held_ports(len(self.shape.tasks) + 1))
        self.chief_address = f"127.0.0.1:{for_chief}"
        ports = [f"127.0.0.1:{port}" for port in free]
        self.spec = ClusterSpec(tuple(ports[: self.shape.num_ps]), tuple(ports[self.shape.num_ps :]))
        # Messages from before the first task is forked are in its log.
        forks = fork_server(log_path(self.log_dir, self.shape.tasks[0]))
        self._fork_server = self._at_end.enter_context(forks)
        self._at_end.callback(self._end_children)
        for task in self.spec.tasks:
            self._children[task] = self._launch(task, self.spec)

    def wait(self) -> None:
        """Waits until every task serves; starts all of them again if a port was taken in the meantime."""
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._wait_until_ready()
                self._watch_over(self.spec.tasks)
                return
            except ClusterError:
                port_taken = any("Address already in use" in child.log_tail() for child in self._children.values())
                self.stop()
                if attempt == _START_ATTEMPTS or not port_taken:
                    raise
                self.launch()

    def stop(self, *, will_resume: bool = False) -> None:
        self._at_end.close()

    def _end_children(self) -> None:
        end_children(self._children.values(), _STOP_SECS)
        self._children.clear()
        self._starting.clear()
        self._joining.clear()
        if self._guard is not None:
            end_children([self._guard], _STOP_SECS)
            self._guard = None

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        for task in self._children if tasks is None else tasks:
            self._children[task].kill()
            self._children[task].wait()
        return True

    def restart(self, task: Task) -> bool:
        end_children([self._children[task]], _STOP_SECS)
        self._children[task] = self._launch(task, self.spec)
        self._starting.add(task)
        return True

    def tasks_to_leave(self) -> set[Task]:
        # What a task says that was restarted shows that it serves.
        tasks = set(self.spec.of_job("worker")) & self._children.keys() - self._starting
        pipes = {self._children[task].stdout.fileno(): task for task in tasks}
        told = set()
        for pipe in connection.wait(list(pipes), 0.0):
            if isinstance(pipe, int) and LEAVES in os.read(pipe, 1 << 10):
                told.add(pipes[pipe])
        return told

    def begin_to_add(self, num_ps: int, num_workers: int) -> list[Task]:
        tasks = [*self.spec.free_places("ps", num_ps), *self.spec.free_places("worker", num_workers)]
        # The port of a task that has left is held for whoever takes its place.
        new = [task for task in tasks if task not in self.spec.left]
        ports = self._at_end.enter_context(held_ports(len(new)))
        addresses = {task: f"127.0.0.1:{port}" for task, port in zip(new, ports)}
        self._joining = {task: addresses.get(task) or self.spec.address(task) for task in tasks}
        spec = self.spec.with_tasks(self._joining)
        try:
            for task in tasks:
                self._children[task] = self._launch(task, spec)
        except (ClusterError, OSError):
            self.dismiss([task for task in tasks if task in self._children])
            self._joining.clear()
            raise
        return tasks

    def are_ready(self, joining: Collection[Task]) -> bool:
        pipes = {task: self._children[task].stdout.fileno() for task in joining}
        ready = connection.wait(list(pipes.values()), 0.0)
        for task in joining:
            child = self._children[task]
            if child.poll() is not None:
                raise ClusterError(f"{task} exited while starting ({child.how_it_ended()}){child.log_tail()}")
            if child.is_late:
                raise self._late([task])
        return len(ready) == len(pipes)

    def admit(self, joining: Collection[Task]) -> None:
        self.spec = self.spec.with_tasks({task: self._joining.pop(task) for task in joining})
        self._watch_over(list(joining))
        self._share_cores()

    def dismiss(self, leaving: Collection[Task]) -> None:
        self.spec = self.spec.without([task for task in leaving if task not in self._joining])
        for task in leaving:
            self._joining.pop(task, None)
            self._starting.discard(task)
        end_children([self._children.pop(task) for task in leaving], _STOP_SECS)
        self._share_cores()

    def starting_tasks(self) -> set[Task]:
        for task in list(self._starting):
            child = self._children[task]
            if child.poll() is None and child.is_late:
                child.kill()
            # A process that has exited is among the lost ones.
            if child.poll() is not None:
                self._starting.discard(task)
            elif connection.wait([child.stdout.fileno()], 0.0):
                self._starting.discard(task)
                # Not before: a task that is not forked yet has no process id.
                self._watch_over([task])
        return set(self._starting)

    @property
    def pids(self) -> dict[Task, int]:
        return {task: child.pid for task, child in self._children.items()}

    def lost_tasks(self) -> dict[Task, str]:
        children = {task: child for task, child in self._children.items() if task not in self._joining}
        ended = {task: child for task, child in children.items() if child.poll() is not None}
        if ended and self._guard is not None and connection.wait([self._guard.stdout.fileno()], 0.0):
            self._were_stopped |= {int(pid) for pid in os.read(self._guard.stdout.fileno(), 1 << 16).split()}
        if self._guard is not None and self._guard.poll() is not None:
            self._watch_over([])
        killed = f"was stopped for {self._guard_secs:g} s and killed"
        return {
            task: killed if child.pid in self._were_stopped else f"died ({child.how_it_ended()})"
            for task, child in ended.items()
        }

    def _watch_over(self, tasks: Sequence[Task]) -> None:
        """Starts to watch tasks that may be stopped for too long; see `kdist.cluster.processes.watchdog`."""
        if sys.platform != "linux":
            return
        if self._guard is not None and self._guard.poll() is not None:
            warn(f"the watchdog of stopped tasks died ({self._guard.how_it_ended()}); another one watches")
            end_children([self._guard], _STOP_SECS)
            self._guard = None
            tasks = [task for task in self._children if task not in self._starting | self._joining.keys()]
        if self._guard is None:
            self._guard = start_child(
                [sys.executable, "-S", watchdog.__file__, str(self._guard_secs)], stdout=subprocess.PIPE
            )
        # It may die at any time.
        with suppress(BrokenPipeError):
            self._guard.stdin.write("".join(f"{self._children[task].pid}\n" for task in tasks).encode())
            self._guard.stdin.flush()

    def _share_cores(self) -> None:
        """Binds tasks as if the cluster had begun in its present shape; the numbers of their threads stay."""
        if sys.platform != "linux":
            return
        for task in self._children.keys() - self._starting - self._joining.keys():
            _, _, cores = share_of_machine(task, self.spec.shape)
            # It may have ended, and a thread of it.
            with suppress(FileNotFoundError):
                for thread in os.listdir(f"/proc/{self._children[task].pid}/task"):
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread), cores or usable_cores())

    def _launch(self, task: Task, spec: ClusterSpec) -> Child:
        options = TaskOptions(spec.jobs, task.job, task.index, *share_of_machine(task, spec.shape))
        program = TaskProgram(
            "kdist.cluster.processes.server",
            options.to_json(),
            task_environment(task, self._config.devices),
            log_path(self.log_dir, task),
        )
        return start_task(self._fork_server, program, self._config.start_timeout)

    def _wait_until_ready(self) -> None:
        waiting = {child.stdout.fileno(): task for task, child in self._children.items()}
        deadline = min(child.deadline for child in self._children.values())
        while waiting:
            if not (ready := connection.wait(waiting, max(0.0, deadline - time.monotonic()))):
                raise self._late(sorted(waiting.values(), key=str))
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                task = waiting.pop(pipe)
                if os.read(pipe, len(READY)) != READY:
                    child = self._children[task]
                    raise ClusterError(f"{task} exited while starting ({child.how_it_ended()}){child.log_tail()}")

    def _late(self, tasks: Sequence[Task]) -> ClusterError:
        return ClusterError(
            f"{', '.join(map(str, tasks))} did not respond within {self._config.start_timeout:g} s "
            "(cluster.start_timeout)" + self._children[tasks[0]].log_tail()
        )
