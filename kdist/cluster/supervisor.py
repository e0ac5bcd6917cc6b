"""`Supervisor`: knows which tasks of a cluster serve, and has lost workers started again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError
from kdist.warn import warn

_SOON_SECS = 2.0
_POLL_SECS = 0.1


class Cluster(Protocol):
    """Where the tasks are: started by this process, or by others."""

    spec: ClusterSpec
    #: `host:port` at which the tasks reach this process; known when it is launched.
    chief_address: str

    def launch(self) -> None:
        """Starts what this process has to start, and returns at once."""

    def wait(self) -> None:
        """Waits until every task serves, at most for a time that it knows."""

    def lost_tasks(self) -> dict[Task, str]:
        """The tasks that do not serve and will not by themselves, with what is known of it."""

    def silent_tasks(self) -> set[Task]:
        """The tasks that do not respond, and that do not count as lost yet."""

    def starting_tasks(self) -> set[Task]:
        """The tasks that were started again and do not serve yet."""

    def cut_off(self, task: Task) -> None:
        """Ends the connections with a task that is lost, if it may be silent: nobody is to wait for it."""

    def let_in(self, task: Task) -> None:
        """Undoes `cut_off`: the task is there again."""

    def restart(self, task: Task) -> bool:
        """Starts a lost task again at its address and returns at once; False if that is not for this process to do."""

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        """Kills tasks, all if None; False if some are not this process's."""

    @property
    def pids(self) -> Mapping[Task, int]:
        """Process ids of the tasks that this process has started."""

    def stop(self) -> None:
        """Ends the cluster; may be called again."""


class Supervisor:
    """Watches the tasks of a cluster.

    Args:
        cluster: which tasks; they serve.
        max_worker_restarts: how often each worker is started again.

    Attributes:
        restarts: how many workers were started again, or came back.
    """

    def __init__(self, cluster: Cluster, max_worker_restarts: int) -> None:
        self._cluster = cluster
        self._max_restarts = max_worker_restarts
        self._restarts_of: Counter[Task] = Counter()
        self._lost_since: dict[Task, float] = {}
        #: Lost workers that come back only if others start them.
        self._given_up: set[Task] = set()
        self.restarts = 0

    @property
    def spec(self) -> ClusterSpec:
        """Where the tasks are."""
        return self._cluster.spec

    @property
    def chief_address(self) -> str:
        """Where the tasks reach this process."""
        return self._cluster.chief_address

    def silent(self) -> set[Task]:
        """The tasks that do not respond, and may yet: training waits for them."""
        return self._cluster.silent_tasks()

    def cut_off(self, task: Task) -> None:
        """Ends the connections with a task that is lost."""
        self._cluster.cut_off(task)

    def let_in(self, task: Task) -> None:
        """Undoes `cut_off`."""
        self._cluster.let_in(task)

    def check(self) -> list[int]:
        """Looks at every task once, and has lost workers started again.

        Returns:
            Indices of the workers that serve.

        Raises:
            ClusterError: a parameter server is lost, or no worker is left and none is coming.
        """
        lost = self._cluster.lost_tasks()
        starting = self._cluster.starting_tasks()
        if servers := {task: how for task, how in lost.items() if task.job == "ps"}:
            raise ClusterError(describe_lost(servers))
        workers = [task for task in self.spec.shape.tasks if task.job == "worker"]
        serving = [task for task in workers if task not in lost and task not in starting]
        for task in workers:
            if task in lost:
                self._start_again(task, lost[task])
            elif task in serving and task in self._lost_since:
                self._is_back(task)
        if self._given_up.issuperset(workers):
            raise ClusterError("no worker is left: " + describe_lost(lost))
        return [task.index for task in serving]

    def kill(self, tasks: Collection[Task]) -> bool:
        """Kills tasks that do not answer; False if they are not this process's."""
        return self._cluster.kill(tasks)

    def lost_soon(self) -> dict[Task, str]:
        """The lost tasks; with none, those after a moment: a process that was killed ends after its connections."""
        deadline = time.monotonic() + _SOON_SECS
        while not (lost := self._cluster.lost_tasks()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return lost

    def _is_back(self, task: Task) -> None:
        self.restarts += 1
        self._given_up.discard(task)
        seconds = time.monotonic() - self._lost_since.pop(task)
        warn(f"{task} is back after {seconds:.1f} s")

    def _start_again(self, task: Task, how: str) -> None:
        """Has a lost worker started again, if that may be; says once what becomes of it."""
        self._lost_since.setdefault(task, time.monotonic())
        number = self._restarts_of[task] + 1
        if number <= self._max_restarts and self._cluster.restart(task):
            self._restarts_of[task] = number
            what = f"it is started again ({number} of {self._max_restarts})"
        elif task not in self._given_up:
            self._given_up.add(task)
            what = "training goes on without it and its part of the data"
        else:
            return
        warn(f"{describe_lost({task: how})}; {what}")


def describe_lost(lost: Mapping[Task, str]) -> str:
    """`worker:1 is lost (killed by signal 9, SIGKILL)`, joined over the tasks."""
    return ", ".join(f"{task} is lost ({how})" for task, how in lost.items())
