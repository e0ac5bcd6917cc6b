"""The shape of a cluster (`2ps2w`), the addresses of its tasks, and the role of each."""

from __future__ import annotations

import abc
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

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

    @classmethod
    def of_text(cls, text: str) -> ClusterShape:
        """Undoes `str`: as `parse`, also without a worker, as `2ps0w`."""
        match = _SHAPE.fullmatch(text)
        num_ps, num_workers, num_evaluators = (int(n or 0) for n in match.groups()) if match else (0, 0, 0)
        return cls(num_ps, num_workers, num_evaluators == 1)

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
        if self.num_workers == 0 and not self.num_ps:
            return "local"
        ps, evaluator = f"{self.num_ps}ps" if self.num_ps else "", "1e" if self.has_evaluator else ""
        return f"{ps}{self.num_workers}w{evaluator}"


@dataclass(frozen=True)
class ClusterSpec:
    """The addresses (`host:port`) of a cluster's tasks; a cluster spec in TensorFlow's words.

    Without a separate `chief`, worker 0 or the process that started the tasks is the chief as well.

    Attributes:
        left: the tasks that have left a cluster that was resized; others may take their places.
    """

    ps: tuple[str, ...]
    worker: tuple[str, ...]
    chief: str | None = None
    left: frozenset[Task] = frozenset()

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(len(self.of_job("ps")), len(self.of_job("worker")))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task except chief and evaluator: parameter servers first, then workers."""
        return tuple(task for task in ClusterShape(len(self.ps), len(self.worker)).tasks if task not in self.left)

    def of_job(self, job: str) -> list[Task]:
        """The tasks of a job."""
        return [task for task in self.tasks if task.job == job]

    def free_places(self, job: str, number: int, but: Collection[Task] = ()) -> list[Task]:
        """So many places for tasks to join, but some: those of tasks that have left, then new ones."""
        places, taken, index = list[Task](), {*self.of_job(job), *but}, 0
        while len(places) < number:
            if (task := Task(job, index)) not in taken:
                places.append(task)
            index += 1
        return places

    def with_tasks(self, joining: Mapping[Task, str]) -> ClusterSpec:
        """The same cluster with more tasks, at free places."""
        hosts = {"ps": list(self.ps), "worker": list(self.worker)}
        for task, address in sorted(joining.items(), key=lambda each: each[0].index):
            hosts[task.job][task.index : task.index + 1] = [address]
        return replace(self, ps=tuple(hosts["ps"]), worker=tuple(hosts["worker"]), left=self.left - joining.keys())

    def without(self, tasks: Collection[Task]) -> ClusterSpec:
        """The same cluster when some of its tasks have left."""
        return replace(self, left=self.left | {*tasks})

    @property
    def jobs(self) -> dict[str, list[str]]:
        """Addresses of servers and workers by job, as `tf.train.ClusterSpec` takes them, without empty jobs.

        The places of tasks that have left are among them.
        """
        return {job: list(hosts) for job, hosts in (("ps", self.ps), ("worker", self.worker)) if hosts}

    @property
    def addresses(self) -> dict[Task, str]:
        chief = {CHIEF: self.chief} if self.chief else {}
        return chief | {task: self.address(task) for task in self.tasks}

    def port(self, task: Task) -> int:
        return int(self.address(task).rpartition(":")[2])

    def address(self, task: Task) -> str:
        """The address of a task; raises `ConfigError` if the cluster has no such task."""
        hosts = self.jobs.get(task.job, [])
        if not 0 <= task.index < len(hosts):
            have = ", ".join(map(str, self.tasks))
            raise ConfigError(f"the cluster has no task {task}; it has {have}")
        return hosts[task.index]


@dataclass(frozen=True)
class ClusterChange:
    """A change of the tasks of a cluster that is training.

    Attributes:
        workers, ps: the number of tasks of the job to have; None for as many as there are.
        move: a server whose values another one is to take, which joins in its place.
        leave: a task that is to leave.
    """

    workers: int | None = None
    ps: int | None = None
    move: Task | None = None
    leave: Task | None = None

    #: The forms of `parse`.
    FORMS: ClassVar[str] = "workers=4, ps=3, move=ps:0, leave=worker:1, or a shape, as 3ps4w"

    @classmethod
    def parse(cls, words: Sequence[str]) -> ClusterChange:
        """Reads `workers=4`, `ps=3`, `move=ps:0` and shapes; raises `ConfigError` for others."""
        change = cls()
        for word in words:
            key, _, value = word.partition("=")
            if match := re.fullmatch(r"ps:(\d+)", value) if key == "move" else None:
                change = replace(change, move=Task("ps", int(match[1])))
            elif match := re.fullmatch(r"(ps|worker):(\d+)", value) if key == "leave" else None:
                change = replace(change, leave=Task(match[1], int(match[2])))
            elif key == "workers" and value.isdecimal():
                change = replace(change, workers=int(value))
            elif key == "ps" and value.isdecimal():
                change = replace(change, ps=int(value))
            elif not value and _SHAPE.fullmatch(word):
                shape = ClusterShape.parse(word)
                change = replace(change, workers=shape.num_workers, ps=shape.num_ps or change.ps)
            else:
                raise ConfigError(f"{word}: cannot be read as a change of a cluster; give {cls.FORMS}")
        if change.leave is not None and change != cls(leave=change.leave):
            raise ConfigError(f"{change}: give leave alone")
        if change == cls():
            raise ConfigError(f"nothing to change is given; give {cls.FORMS}")
        return change

    @classmethod
    def of(cls, workers: int | None, ps: int | None, move: str | None) -> ClusterChange:
        """The change of these values; raises `ConfigError` as `parse`."""
        given = {"workers": workers, "ps": ps, "move": move}
        return cls.parse([f"{key}={value}" for key, value in given.items() if value is not None])

    def applied_to(self, spec: ClusterSpec) -> ClusterShape:
        """The shape of a cluster after it.

        Raises:
            ConfigError: it leaves no task of a job, or moves a server that does not exist.
        """
        shape = spec.shape
        for key, task in (("move", self.move), ("leave", self.leave)):
            if task is not None and task not in spec.tasks:
                raise ConfigError(f"{key}={task}: there is no such task; there are {', '.join(map(str, spec.tasks))}")
        if self.leave is not None:
            is_ps = self.leave.job == "ps"
            if is_ps and shape.num_ps == 1:
                raise ConfigError(f"leave={self.leave}: no other server can take its values; give move={self.leave}")
            return replace(shape, num_ps=shape.num_ps - is_ps, num_workers=shape.num_workers - (not is_ps))
        if self.ps and not shape.num_ps:
            raise ConfigError(f"ps={self.ps}: {shape} has no parameter servers, and none can join")
        for job, number in (("workers", self.workers), ("ps", self.ps if shape.num_ps else None)):
            if number == 0:
                raise ConfigError(f"{job}=0: must be at least 1")
        return replace(shape, num_ps=self.ps or shape.num_ps, num_workers=self.workers or shape.num_workers)

    def __str__(self) -> str:
        given = {"workers": self.workers, "ps": self.ps, "move": self.move, "leave": self.leave}
        return " ".join(f"{key}={value}" for key, value in given.items() if value is not None)


@dataclass(frozen=True)
class Membership:
    """The role of this process in a cluster whose tasks are started one by one."""

    spec: ClusterSpec
    task: Task
    #: Whether it has joined a cluster that was training.
    has_joined: bool = False
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

    def tasks_to_leave(self) -> set[Task]:
        """The tasks that were told to leave since this was called last, as by SIGTERM."""
        return set()

    def tasks_to_join(self) -> Counter[str]:
        """The number of tasks, by job, that others have started and that wait for a place."""
        return Counter()

    def refuse_to_join(self, why: str) -> None:  # noqa: B027
        """Tells those tasks that they get no place."""

    @property
    def meeting_place(self) -> str | None:
        """The address at which tasks that others start ask for a place; None if this process starts all."""
        return None

    def check_leaving(self, leaving: Collection[Task]) -> None:  # noqa: B027
        """Refuses, with a `ConfigError`, to do without tasks that cannot leave."""

    def begin_to_add(self, num_ps: int, num_workers: int) -> list[Task]:
        """Starts tasks that are to join, and returns at once; they are no part of the cluster before `admit`.

        Raises:
            ConfigError: others start the tasks of this cluster.
        """
        raise ConfigError(
            "others start the tasks of this cluster, so that this process cannot start any: a worker joins when "
            "somebody starts one with the address of the chief"
        )

    def are_ready(self, joining: Collection[Task]) -> bool:
        """True if all of these tasks serve; raises `ClusterError` if one has exited, or takes too long."""
        return True

    def admit(self, joining: Collection[Task]) -> None:  # noqa: B027 - others admit those that have come
        """Makes tasks that serve a part of the cluster."""

    def dismiss(self, leaving: Collection[Task]) -> None:  # noqa: B027
        """Lets tasks exit, whether they are a part of the cluster or were to join it."""

    @property
    def pids(self) -> Mapping[Task, int]:
        """Process ids of the tasks that this process started."""
        return {}
