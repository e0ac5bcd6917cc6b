"""What a strategy is: how training steps are spread over tasks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import keras
import numpy as np

from kdist.cluster.spec import Task
from kdist.data import TrainingData
from kdist.errors import ConfigError
from kdist.parameters.placement import Plan
from kdist.strategies.calls import StepLogs

if TYPE_CHECKING:
    from kdist.strategies.on_workers import WorkerJob


@dataclass(frozen=True)
class Program:
    """What a strategy is to run.

    Attributes:
        model: the chief's compiled model; it gives the step function and the initial values, and stays as it is.
        data: what the workers read.
        batch_size: examples per replica and step, as given to `fit`; None if it was not given.
        steps_per_call: steps unrolled in one call; None lets the strategy choose.
        seed: where shuffling and Dropout start.
        log_dir: folder for the logs of the tasks.
        last_step: the global step that training is to end at; None if nobody knows.
        grace_secs: seconds within which a run that is interrupted has to end.
        data_begins_at: the global step at which the workers begin to read the data.
    """

    model: keras.Model
    data: TrainingData
    batch_size: int | None
    steps_per_call: int | None
    seed: int
    log_dir: Path
    last_step: int | None = None
    grace_secs: float = 30.0
    data_begins_at: int = 0

    @property
    def first_step(self) -> int:
        """The global step that the model is at."""
        return int(self.model.optimizer.iterations)

    def learning_rate(self, step: int) -> float:
        """The learning rate at a global step, by the optimizer's schedule if it has one."""
        with keras.StatelessScope([(self.model.optimizer._iterations, step)]):
            return float(self.model.optimizer.learning_rate)

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the model's optimizer; the strategy has its own.

        Raises:
            ConfigError: it follows a schedule.
        """
        try:
            self.model.optimizer.learning_rate = value
        except TypeError:
            raise ConfigError(
                f"learning_rate={value}: the learning rate of this optimizer follows a schedule and cannot be set"
            ) from None


class Strategy(abc.ABC):
    """Runs training steps of a program and holds what they change.

    A strategy is started once, runs any number of times and is stopped once. Between two runs nothing is in flight but
    what `run` was allowed to begin, and `settle` waits for that.
    """

    #: Its name in configs.
    name: ClassVar[str]

    #: Whether an update may be computed from parameters older than those it is applied to.
    is_asynchronous: ClassVar[bool] = False

    #: Whether workers can be asked to do more than training, by `on_workers`.
    has_workers: ClassVar[bool] = False

    #: How many replicas compute gradients.
    num_replicas: int = 1

    #: How many batches make one update: 1 if every gradient is applied by itself.
    batches_per_step: int = 1

    #: Where each variable lives; None without servers, or before `start`.
    plan: Plan | None = None

    @abc.abstractmethod
    def start(self, program: Program) -> None:
        """Brings up tasks and variables, with the values that the model has now."""

    @abc.abstractmethod
    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        """Runs `num_steps` steps and returns when all are done.

        Args:
            num_steps: at least 1.
            interrupted: asked between calls; True ends the run early, after what is in flight.
            may_begin: how many steps may be begun before it returns, so that nothing stands still until the next run;
                `num_steps` if None. The steps that come first count for this run, the others for the next ones.

        Returns:
            Logs of `num_steps` steps, or if it was interrupted of all that were begun; None if that is none.
        """

    @abc.abstractmethod
    def settle(self) -> int:
        """Waits until nothing is in flight; returns how many steps are done that no `run` has returned yet."""

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and no step is done that no `run` has returned yet."""

    @abc.abstractmethod
    def global_step(self) -> int:
        """The exact number of updates applied, when nothing is in flight any more."""

    @property
    @abc.abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of everything that training changes, by name: what a checkpoint holds."""

    @abc.abstractmethod
    def read(self) -> dict[str, np.ndarray]:
        """The present value of everything that training changes, by name, when nothing is in flight."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values by name."""

    @property
    @abc.abstractmethod
    def warming_up(self) -> bool:
        """Whether the last run traced a new function, so that its time says nothing about speed."""

    def employ(self, workers: Collection[int]) -> None:
        """Lets only these workers run steps, from their next call on.

        Args:
            workers: their indices.

        Raises:
            ConfigError: every step needs all workers.
        """
        if len(set(workers)) < self.num_replicas:
            raise ConfigError(f"strategy={self.name}: every step needs all workers; none can begin later")

    def on_workers(self, job: WorkerJob) -> list[Any] | None:
        """What the workers bring of each part of a job, in their order; None if there are none to ask.

        Args:
            job: may run many times; what it has put on the workers stays there.
        """
        return None

    @property
    def worker_restarts(self) -> int:
        """How many workers were lost and came back."""
        return 0

    @property
    def addresses(self) -> Mapping[Task, str]:
        """Where the tasks beside this process serve, as `host:port`."""
        return {}

    @property
    def pids(self) -> Mapping[Task, int]:
        """Process ids of the tasks that this process has started."""
        return {}

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends all tasks. May be called at any time, also after a failed start, and more than once."""
