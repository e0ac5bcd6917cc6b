"""The shape of a cluster (`2ps2w`), the addresses of its tasks, and the role of each."""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kdist.errors import ConfigError

_SHAPE = re.compile(r"(?:(\d+)ps)?(\d+)w(?:(\d+)e)?")
_FORM = (
    "NpsMw with N and M of at least 1 (2ps2w is 2 parameter servers and 2 workers; 2ps2w1e has an evaluator as well), "
    "or local for one process"
)


@dataclass(frozen=True)
class Task:
    """One process of a cluster: `chief`, `ps:0`, `worker:1`."""

    job: str
    index: int

    def __str__(self) -> str:
        return self.job if self.is_chief else f"{self.job}:{self.index}"

    @property
    def device(self) -> str:
        """The TensorFlow device name of the task's CPU."""
        return f"/job:{self.job}/replica:0/task:{self.index}/device:CPU:0"

    @property
    def is_chief(self) -> bool:
        """True for the task that runs the training loop; parameter servers and workers never do."""
        return self.job == "chief"


CHIEF = Task("chief", 0)
#: It is not part of the cluster: it reads the chief's checkpoints, and no task connects to it.
EVALUATOR = Task("evaluator", 0)


@dataclass(frozen=True)
class ClusterShape:
    """The number of tasks of each job; an evaluator comes beside. `num_ps == num_workers == 0` is one local process."""

    num_ps: int = 0
    num_workers: int = 0
    has_evaluator: bool = False

    @classmethod
    def parse(cls, text: str) -> ClusterShape:
        """Reads `2ps2w`, `2ps2w1e`, `4w` or `local`; raises `ConfigError` for others, and jobs without tasks."""
        if text == "local":
            return cls()
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise ConfigError(f"cluster={text}: not the form {_FORM}")
        num_ps, num_workers, num_evaluators = (None if n is None else int(n) for n in match.groups())
        for number, job in ((num_workers, "worker"), (num_ps, "parameter server")):
            if number == 0:
                raise ConfigError(f"cluster={text}: no {job}; the form is {_FORM}")
        if num_evaluators is not None and (num_evaluators != 1 or num_ps is None):
            raise ConfigError(f"cluster={text}: there is one evaluator, beside parameter servers: as in 2ps2w1e")
        return cls(num_ps or 0, num_workers or 0, num_evaluators == 1)

    @property
    def is_local(self) -> bool:
        """True if everything happens in the chief's own process."""
        return self.num_ps == 0 and self.num_workers <= 1

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task except chief and evaluator: parameter servers first, then workers."""
        ps = [Task("ps", i) for i in range(self.num_ps)]
        return (*ps, *(Task("worker", i) for i in range(self.num_workers)))

    def __str__(self) -> str:
        if self.num_workers == 0:
            return "local"
        ps, evaluator = f"{self.num_ps}ps" if self.num_ps else "", "1e" if self.has_evaluator else ""
        return f"{ps}{self.num_workers}w{evaluator}"


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses (`host:port`) of a cluster's tasks; a cluster spec in TensorFlow's words.

    Without a separate `chief`, worker 0 or the process that started the tasks is the chief as well.
    """

    ps: tuple[str, ...]
    worker: tuple[str, ...]
    chief: str | None = None

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(len(self.ps), len(self.worker))

    @property
    def jobs(self) -> dict[str, list[str]]:
        """Addresses of servers and workers by job, as `tf.train.ClusterSpec` takes them, without empty jobs."""
        return {job: list(hosts) for job, hosts in (("ps", self.ps), ("worker", self.worker)) if hosts}

    @property
    def addresses(self) -> dict[Task, str]:
        chief = {CHIEF: self.chief} if self.chief else {}
        return chief | {task: self.address(task) for task in self.shape.tasks}

    def port(self, task: Task) -> int:
        return int(self.address(task).rpartition(":")[2])

    def address(self, task: Task) -> str:
        """The address of a task; raises `ConfigError` if the cluster has no such task."""
        hosts = self.jobs.get(task.job, [])
        if not 0 <= task.index < len(hosts):
            have = ", ".join(map(str, self.shape.tasks))
            raise ConfigError(f"the cluster has no task {task}; it has {have}")
        return hosts[task.index]


@dataclass(frozen=True)
class Membership:
    """The role of this process in a cluster whose tasks are started one by one."""

    spec: ClusterSpec
    task: Task
    #: Whether a program that uses kdist started the tasks, on this machine, for one of its fits.
    started_by_kdist: bool = False

    @property
    def is_chief(self) -> bool:
        """True if this process runs the training loop."""
        return self.task.is_chief or (self.spec.chief is None and self.task == Task("worker", 0))

    @property
    def runs_program(self) -> bool:
        """True if this process runs the program: the chief, and without parameter servers every worker."""
        return self.is_chief or (not self.spec.ps and self.task.job == "worker")

    @property
    def evaluates(self) -> bool:
        """True for an evaluator, which is not part of the cluster and reads the chief's checkpoints."""
        return self.task.job == EVALUATOR.job


class Cluster(abc.ABC):
    """The tasks of a cluster, which this process or others start.

    Attributes:
        spec: addresses of the tasks; known when they are launched.
        chief_address: `host:port` at which the tasks reach this process; known then.
        any_chief_port: whether they reach it at any other port as well.
    """

    spec: ClusterSpec
    chief_address = ""
    any_chief_port = True

    @abc.abstractmethod
    def launch(self) -> None:
        """Starts the tasks of this process, and returns at once."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until every task serves, at most for `cluster.start_timeout`."""

    @abc.abstractmethod
    def lost_tasks(self) -> dict[Task, str]:
        """The lost tasks, each with a predicate for messages: `died (exit code 1)`."""

    @abc.abstractmethod
    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        """Kills tasks, all if None, and waits until they have exited; False if others started some of them."""

    @abc.abstractmethod
    def stop(self, *, will_resume: bool = False) -> None:
        """Stops the cluster, within a few seconds, also repeatedly; the run is not at its end if it `will_resume`."""

    def silent_tasks(self) -> set[Task]:
        """The tasks that do not respond, and do not count as lost yet; none on this machine."""
        return set()

    def starting_tasks(self) -> set[Task]:
        """The tasks that were restarted and do not serve yet; kills one that takes too long."""
        return set()

    def disconnect(self, task: Task) -> None:  # noqa: B027 - this machine does so for its own processes
        """Closes the connections with a task that is lost, if it may be silent, so that nothing waits for it."""

    def reconnect(self, task: Task) -> None:  # noqa: B027
        """Undoes `disconnect`: the task has returned."""

    def restart(self, task: Task) -> bool:
        """Restarts an exited task at its address, and returns at once; False if others start the tasks."""
        return False

    @property
    def pids(self) -> Mapping[Task, int]:
        """Process ids of the tasks that this process started."""
        return {}
