"""`Strategy`: spreads training steps over tasks. `Values`: the values that they change, by name."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import is_multi_optimizer, learning_rate_variable, main_optimizer, step_counter
from kdist.cluster.spec import ClusterChange, ClusterShape, Task
from kdist.config.scheduler import GRACE_SECS
from kdist.data.base import TrainingData
from kdist.data.epoch_lengths import EpochCount, EpochLengths
from kdist.errors import ConfigError
from kdist.model.embedding_lookup import TableGroup
from kdist.model.lookup_rounds import RowSource
from kdist.model.names import DATA_FINGERPRINT, DATA_STATE, EPOCHS_BEGIN, SEED
from kdist.parameters.placement.plan import PlacementPlan
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.strategies.call_logs import StepLogs


class Values(abc.ABC):
    """The values that training changes, by name: the content of a checkpoint.

    Every method waits until no step is in flight.

    Attributes:
        shapes: of every value; None as the number of rows of a dynamic table.
        by_rows: the names of the values of which a delta has the changed rows only.
    """

    shapes: Mapping[str, tuple[int, ...]]
    by_rows: frozenset[str]

    @abc.abstractmethod
    def global_step(self) -> int:
        """The exact number of updates applied."""

    def read(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """The present values; only `names` if they are given."""
        return {name: value for portion in self.portions(names) for name, value in portion.items()}

    @abc.abstractmethod
    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        """As `read`, in portions, so that they are not in memory at once."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values."""

    @abc.abstractmethod
    def histograms(self) -> dict[str, np.ndarray]:
        """The distribution of each parameter, see `histograms_of`."""

    @abc.abstractmethod
    def next_interval(self, since: int | None) -> int | None:
        """Begins the next interval between saves.

        Args:
            since: the interval after which rows have changed that the next delta has; None if there is no such delta.

        Returns:
            The number of the interval that it ends, for `DeltaBase`; None if every checkpoint is to be a full one.
        """

    @abc.abstractmethod
    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        """Writes all values, and the seed, as a TensorFlow checkpoint.

        Args:
            prefix: of its files.
            since: of tables, only the rows that have changed since then are written: a delta.
            aside: whether the present values are copied where they are, and written while training changes them;
                otherwise all is written when this returns, without memory for copies.

        Returns:
            An argument for `wait_for`, once, before the next `begin_save`; it raises the errors of writing aside.

        Raises:
            NonFiniteError: a value is NaN or infinite; nothing is written.
            tf.errors.OpError, OSError: it cannot be written.
        """

    def wait_for(self, written: Future[None]) -> None:
        """Waits until a checkpoint that `begin_save` has begun is written."""
        written.result()

    @abc.abstractmethod
    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        """Reads all values from a checkpoint, except for the learning rate.

        Args:
            deltas: read on top of it, in this order.

        Raises:
            tf.errors.OpError: the checkpoint, or a delta, is damaged; some values may have been read.
        """

    @abc.abstractmethod
    def count_rows(self) -> None:
        """Tells the dynamic layers of the model how many rows they have, if it has any."""

    @abc.abstractmethod
    def use_averages(self) -> None:
        """Sets parameters to their moving averages, if the optimizer keeps any, as Keras does at the end of `fit`."""

    def check(self, values: Mapping[str, np.ndarray]) -> None:
        """Refuses values that `write` could not set.

        Raises:
            ConfigError: there is no such value, or it has another shape.
        """
        for name, array in values.items():
            if name not in self.shapes:
                known = ", ".join(sorted(self.shapes))
                raise ConfigError(f"{name}: there is no such value to write; there are learning_rate, {known}")
            if None in self.shapes[name]:
                raise ConfigError(
                    f"{name}: belongs to a DynamicEmbedding, whose rows come from ids alone; it is read only"
                )
            if array.shape != tuple(self.shapes[name]):
                raise ConfigError(f"{name}: has shape {array.shape}; the model's has {tuple(self.shapes[name])}")


@dataclass(frozen=True)
class PresentValues:
    """The values of a training, for functions that workers run.

    Attributes:
        variables: the model's, without seeds.
        tables: embedding layers whose tables are looked up by rows, by the index of the table in `variables`.
        table_groups: these tables in groups.
        pull: called while a function is traced: the values of `variables`, None for tables; and the rows of tables,
            None if there are none.
    """

    variables: Sequence[keras.Variable]
    tables: Mapping[int, keras.layers.Layer]
    table_groups: Sequence[TableGroup]
    pull: Callable[[], tuple[Sequence[Any], RowSource | None]]


@dataclass(frozen=True)
class TrainingSpec:
    """A training that a strategy runs.

    Attributes:
        model: the chief's compiled model; the source of the step function and the initial values, not changed.
        data: read by the workers.
        batch_size: examples per replica and step, as given to `fit`; None if it was not given.
        steps_per_call: steps unrolled in one call; None lets the strategy choose.
        seed: of shuffling and Dropout.
        log_dir: folder for the logs of the tasks.
        last_step: the global step at which training ends; None if it is not known.
        grace_secs: seconds that an interrupted run has to end.
        on_servers: whether parameter servers have the values, and make large tables.
        stays_on_servers: whether the model, built, is too large for the chief.
        epoch_lengths: of all replicas together; None if nobody knows.
        count: of the epochs, and where the workers began to read the data.
        fingerprint: of the data; None if nobody knows.
        source: from which another process makes the model; None if it gets `model` itself.
        saves_deltas: whether it is marked which rows of tables change, so that checkpoints can be deltas.
    """

    model: keras.Model
    data: TrainingData
    batch_size: int | None
    steps_per_call: int | None
    seed: int
    log_dir: Path
    last_step: int | None = None
    grace_secs: float = GRACE_SECS
    on_servers: bool = False
    stays_on_servers: Callable[[], bool] = lambda: False
    epoch_lengths: EpochLengths | None = None
    count: EpochCount = field(default_factory=EpochCount)
    fingerprint: str | None = None
    saves_deltas: bool = False
    source: Any = None

    def beside_values(self, step: int) -> dict[str, np.ndarray]:
        """The content of a checkpoint of a global step beside the values, by name."""
        count, lengths, passes = self.count, self.epoch_lengths, self.data.passes
        if passes is not None:
            count_of = passes.epoch_after if passes.pass_has_ended() else passes.epoch_at
            count = replace(count, epoch=count.first_epoch + count_of(passes.num_read))
        elif lengths is not None:
            epoch = lengths.epoch_at(step)
            place = {"batch": lengths.batch_at(step), "length": lengths.length_of(epoch)}
            count = replace(count, epoch=count.first_epoch + epoch, **place)
        beside = {SEED: np.array(self.seed, np.int64), EPOCHS_BEGIN: count.to_array()}
        texts = {DATA_STATE: self.data.state(), DATA_FINGERPRINT: self.fingerprint}
        return {**beside, **{name: np.array(text, object) for name, text in texts.items() if text is not None}}

    @property
    def first_step(self) -> int:
        """The global step of the model."""
        return int(step_counter(main_optimizer(self.model)))

    def learning_rate(self, step: int) -> float:
        """The learning rate at a global step, by the optimizer's schedule if it has one; the first one's of several."""
        optimizer = main_optimizer(self.model)
        if is_multi_optimizer(optimizer):
            optimizer = optimizer.optimizers[0]
        if (variable := learning_rate_variable(optimizer)) is not None:
            return float(variable.value.numpy())
        counter = step_counter(optimizer)
        # Keras takes several times longer to convert a number than TensorFlow.
        with keras.StatelessScope([(counter, tf.constant(step, counter.dtype))]):
            return float(optimizer.learning_rate)

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the model's optimizer; the strategy has another copy.

        Raises:
            ConfigError: it follows a schedule.
        """
        if is_multi_optimizer(main_optimizer(self.model)):
            raise ConfigError(f"learning_rate={value}: the optimizers of a MultiOptimizer have a learning rate each")
        try:
            self.model.optimizer.learning_rate = value
        except TypeError:
            raise ConfigError(
                f"learning_rate={value}: the learning rate of this optimizer follows a schedule and cannot be set"
            ) from None


@dataclass(frozen=True)
class PendingResize:
    """A change of the tasks of a running strategy that has begun.

    Attributes:
        before, after: the shape of the cluster.
        joining: tasks that were started for it, and are no part of the cluster yet.
        leaving: tasks that are to leave when it is finished.
    """

    before: ClusterShape
    after: ClusterShape
    joining: Sequence[Task] = ()
    leaving: Sequence[Task] = ()

    @property
    def changes_servers(self) -> bool:
        """True if values move."""
        return any(task.job == "ps" for task in (*self.joining, *self.leaving))


class Strategy(abc.ABC):
    """Runs training steps and holds the values that they change.

    A strategy is started once, runs any number of times and is stopped once. Between two runs only steps that `run` was
    allowed to start are in flight, and `drain` waits for them.
    """

    #: Its name in configs.
    name: ClassVar[str]
    #: True if an update may be computed from older parameters than it is applied to.
    is_asynchronous: ClassVar[bool] = False
    #: True if every replica takes part in each step, with one batch.
    takes_equal_steps: ClassVar[bool] = False
    #: True if workers can also evaluate, by `on_workers`.
    has_workers: ClassVar[bool] = False
    #: The number of replicas that compute gradients.
    num_replicas: int = 1
    #: The batches of one update: 1 if every gradient is applied by itself.
    batches_per_step: int = 1
    #: True if the run was interrupted: another chief will resume it. Set before `stop`.
    is_interrupted: bool = False
    #: True if the last run traced a new function, so that its duration says nothing about speed.
    warming_up: bool = False
    #: The server of each variable; None without servers, or before `start`.
    plan: PlacementPlan | None = None
    #: The values that training changes, once the strategy has started.
    values: Values

    @abc.abstractmethod
    def start(self, spec: TrainingSpec) -> None:
        """Starts the tasks and creates the variables with the present values of the model."""

    @abc.abstractmethod
    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        """Runs `num_steps` steps and returns when all have been applied.

        Args:
            num_steps: at least 1.
            interrupted: called between calls; True ends the run early, after the steps in flight.
            may_begin: the number of steps that may start before it returns, so that workers do not idle until the next
                run; `num_steps` if None. The first steps to finish count for this run, the others for the next ones.

        Returns:
            Logs of `num_steps` steps; if interrupted, of all steps that were started, or None if there are none.
        """

    @property
    def steps_in_flight(self) -> int:
        """The number of steps that may be in flight, so that no worker waits for the next one."""
        return 1

    @property
    def steps_ahead(self) -> int:
        """The number of finished steps that no `run` has returned yet."""
        return 0

    @abc.abstractmethod
    def drain(self) -> None:
        """Waits until nothing is in flight."""

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight and every finished step has been returned by a `run`."""
        return True

    def set_active(self, workers: Collection[int]) -> None:
        """Lets only these workers run steps, from the next call on.

        Args:
            workers: their indices.

        Raises:
            ConfigError: every step needs all workers.
        """
        if len(set(workers)) < self.num_replicas:
            raise ConfigError(f"strategy={self.name}: every step needs all workers; none can start later")

    def on_workers(self, evaluation: Any) -> list[Any] | None:
        """Lets workers evaluate each part; returns their results in the order of the parts, None without workers.

        Args:
            evaluation: as in `kdist.evaluation.on_workers`; may run many times: data that it has placed on the workers
                stays there.
        """
        return None

    def tasks_to_leave(self) -> set[Task]:
        """The tasks that were told to leave since this was called last."""
        return set()

    def tasks_to_join(self) -> ClusterChange | None:
        """The change by which tasks get a place that others have started; None if none waits."""
        return None

    def refuse_to_join(self, why: str) -> None:  # noqa: B027
        """Tells the tasks that wait for a place that they get none."""

    def check_tasks(self) -> None:  # noqa: B027
        """Raises `ClusterError` if a task is lost without which training cannot go on."""

    @property
    def meeting_place(self) -> str | None:
        """The address at which tasks ask for a place; None if they cannot."""
        return None

    @property
    def num_workers(self) -> int:
        """The number of workers that have not left."""
        return max(1, self.num_replicas)

    def begin_resize(self, change: ClusterChange) -> PendingResize:
        """Starts the tasks that are to join, and returns at once; training continues meanwhile.

        Raises:
            ConfigError: the cluster cannot be changed so, or not at all.
        """
        raise ConfigError(f"{change}: a cluster with strategy={self.name} has nothing to resize")

    def may_finish(self, resize: PendingResize) -> bool:
        """True if the tasks that join serve, and workers that leave have finished their calls.

        Raises:
            ClusterError: a task that is to join has exited, or takes too long.
        """
        return True

    def finish_resize(self, resize: PendingResize, spec: TrainingSpec) -> TrainingSpec:
        """Lets tasks join and leave, and moves the values that others are to have.

        Args:
            spec: of the training.

        Returns:
            The spec of the training from now on.

        Raises:
            ResizeError: a task that was to join is lost; nothing has changed.
            ClusterError: another one is lost.
        """
        return spec

    @property
    def can_regroup(self) -> bool:
        """True if training can go on with the tasks that are left when one is lost, from a checkpoint."""
        return False

    def regroup(self, interrupted: Callable[[], bool]) -> PendingResize:
        """Waits for lost tasks to return, and returns the change to those that are there by then, for `finish_resize`.

        Until then, the values can be set, and no steps can run.

        Raises:
            NoWorkersError: too few are left.
            ClusterError: the run was interrupted meanwhile.
        """
        raise NotImplementedError

    def cancel_resize(self, resize: PendingResize) -> None:  # noqa: B027 - most have none
        """Ends the tasks that were to join."""

    @property
    def worker_losses(self) -> int:
        """The number of losses of workers since the strategy started."""
        return 0

    @property
    def worker_restarts(self) -> int:
        """The number of workers that were lost and returned."""
        return 0

    @property
    def addresses(self) -> Mapping[Task, str]:
        """The addresses of the other tasks, as `host:port`."""
        return {}

    @property
    def pids(self) -> Mapping[Task, int]:
        """Process ids of the tasks that this process started, or of the other workers on this machine."""
        return {}

    @abc.abstractmethod
    def stop(self) -> None:
        """Stops all tasks. May be called at any time, also after a failed start, and repeatedly."""
