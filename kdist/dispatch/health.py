"""`Supervisor`: knows which tasks of a cluster serve, and restarts lost workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import wait
from functools import partial

import tensorflow as tf

from kdist._compat.tensorflow import QuietExecutor, executor_scope
from kdist.cluster.spec import Cluster, Task
from kdist.errors import ClusterError
from kdist.log import warn
from kdist.threads import in_thread

_SOON_SECS = 2.0
_POLL_SECS = 0.1


class Supervisor:
    """Watches the tasks of a cluster.

    Args:
        cluster: its tasks serve.
        max_worker_restarts: how often each worker is restarted.

    Attributes:
        restarts: how many workers were restarted, or returned.
    """

    def __init__(self, cluster: Cluster, max_worker_restarts: int) -> None:
        self.cluster = cluster
        self._max_restarts = max_worker_restarts
        self._restarts_of: Counter[Task] = Counter()
        self._lost_since: dict[Task, float] = {}
        #: Lost workers that return only if others start them.
        self._given_up: set[Task] = set()
        #: How tasks that do not serve yet were lost.
        self._how: dict[Task, str] = {}
        self.restarts = 0

    def check(self) -> list[int]:
        """Looks at every task once, and restarts lost workers.

        Returns:
            Indices of the workers that serve.

        Raises:
            ClusterError: a parameter server is lost, or no worker is left and none will return.
        """
        lost = self.cluster.lost_tasks()
        starting = self.cluster.starting_tasks()
        if servers := {task: how for task, how in lost.items() if task.job == "ps"}:
            raise ClusterError(describe_lost(servers))
        workers = self.cluster.spec.of_job("worker")
        serving = [task for task in workers if task not in lost and task not in starting]
        for task in workers:
            if task in lost:
                self._start_again(task, lost[task])
            elif task in self._lost_since and task not in starting:
                self._is_back(task)
        if workers and self._given_up.issuperset(workers):
            raise ClusterError("no worker is left: " + describe_lost(lost))
        return [task.index for task in serving]

    def lost_soon(self) -> dict[Task, str]:
        """The lost tasks; if there are none, those of a moment later: a killed process exits after its connections."""
        deadline = time.monotonic() + _SOON_SECS
        while not (lost := self.cluster.lost_tasks()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return lost

    def forget(self, tasks: Collection[Task]) -> None:
        """Forgets tasks that have left: others may take their places."""
        for task in tasks:
            self._lost_since.pop(task, None)
            self._how.pop(task, None)
            self._restarts_of.pop(task, None)
            self._given_up.discard(task)

    def how_lost(self, task: Task) -> str:
        """Describes how a task was lost that does not serve."""
        return self._how.get(task) or self.lost_soon().get(task, "is lost")

    def _is_back(self, task: Task) -> None:
        self.restarts += 1
        self._how.pop(task, None)
        self._given_up.discard(task)
        seconds = time.monotonic() - self._lost_since.pop(task)
        warn(f"{task} is back after {seconds:.1f} s")

    def _start_again(self, task: Task, how: str) -> None:
        """Restarts a lost worker, if that is allowed; reports once what happens to it."""
        self._lost_since.setdefault(task, time.monotonic())
        self._how[task] = how
        number = self._restarts_of[task] + 1
        if number <= self._max_restarts and self.cluster.restart(task):
            self._restarts_of[task] = number
            what = f"restarting ({number} of {self._max_restarts})"
        elif task not in self._given_up:
            self._given_up.add(task)
            what = "training continues without it and its share of the data"
        else:
            return
        warn(f"{describe_lost({task: how})}; {what}")


def describe_lost(lost: Mapping[Task, str]) -> str:
    """`worker:1 died (signal 9, SIGKILL)`, joined over the tasks."""
    return ", ".join(f"{task} {how}" for task, how in lost.items())


def ask(tasks: Collection[Task], timeout: float) -> tuple[set[Task], set[Task]]:
    """Asks connected tasks for a sign of life.

    Args:
        timeout: seconds to wait for responses; threads that wait longer are left behind.

    Returns:
        The tasks that do not respond in time, and those that are lost or were replaced by other processes.
    """

    def is_well(task: Task) -> bool:
        try:
            with executor_scope(QuietExecutor()), tf.device(task.device):
                tf.identity(0).numpy()
            return True
        except tf.errors.OpError:
            return False

    answers = {task: in_thread(partial(is_well, task)) for task in tasks}
    in_time = wait(answers.values(), timeout).done
    silent = {task for task, answer in answers.items() if answer not in in_time}
    return silent, {task for task in answers.keys() - silent if not answers[task].result()}
