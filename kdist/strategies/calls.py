"""Calls: several replica steps unrolled in one function, so that they share the cost of one dispatch; and the iterators
on the workers that give them batches."""

from __future__ import annotations

import abc
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import function_for_tasks
from kdist.config.schema import ParameterServerOptions
from kdist.data.base import iterator_over, next_of
from kdist.data.split_data import why_unreadable, with_place
from kdist.data.splits import NothingToRead, Splits
from kdist.dispatch.coordinator import Coordinator, may_be_lost
from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.metrics import MetricReader, MetricRows
from kdist.model.replica_step import ReplicaStep
from kdist.model.updates import ReplicaOutput, RunningStep
from kdist.parameters.placement.messages import BlockUpdates, Change, Pulled, fuse
from kdist.parameters.store import ParameterStore
from kdist.strategies.gradient_counts import GradientCounts

T = TypeVar("T")

# A call should be long compared with the few ms that it costs to dispatch, and short compared with a person's patience.
AUTO_CALL_SECS = 1.0
_AUTO_MAX_STEPS = 64
# Nothing can be saved while a call is prepared. So that has to be over well before the time ends that a signal leaves
# (`run.grace_secs`).
AUTO_PREPARE_SECS = 10.0
GROWTH = 4
# A call costs the chief about 2 ms of its CPU, whatever it takes on the worker. Where the chief is what limits, that is
# the time of a step for each worker, and calls of GROWTH steps may take GROWTH times that.
_SECS_PER_WORKER = GROWTH * 0.0025
#: Single steps show how long they take in so many seconds.
_AUTO_FIRST_SECS = 0.1
#: Tasks prepare their parts of a function in about the time in which it was traced.
_SECS_PER_TRACED = 2.0
#: Of the time in which a first step is traced, and prepared; the rest is taken once.
_SHARE_OF_STEP = 0.25


@dataclass(frozen=True)
class StepLogs:
    """The reports of some steps. Logs of different steps can be joined and split.

    Attributes:
        num_examples: int array `[num_steps]`, how many examples each used.
        staleness: int array `[num_steps]`; for each update how many others were applied between its pull and its
            push.
        metrics: loss and metrics of each step.
        gradient_counts: for each step the fate of the workers' gradients, by worker index; empty without workers.
    """

    num_examples: np.ndarray
    staleness: np.ndarray
    metrics: MetricRows
    gradient_counts: tuple[Mapping[int, GradientCounts], ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of updates applied."""
        return len(self.staleness)

    def __add__(self, later: StepLogs) -> StepLogs:
        return StepLogs(
            np.concatenate([self.num_examples, later.num_examples]),
            np.concatenate([self.staleness, later.staleness]),
            self.metrics + later.metrics,
            self.gradient_counts + later.gradient_counts,
        )

    def __getitem__(self, steps: slice) -> StepLogs:
        return StepLogs(
            self.num_examples[steps], self.staleness[steps], self.metrics[steps], self.gradient_counts[steps]
        )

    def beside(self, other: StepLogs) -> StepLogs:
        """The joint report of two replicas on the same synchronous steps."""
        return StepLogs(self.num_examples + other.num_examples, self.staleness, self.metrics.beside(other.metrics))


class CallLogs:
    """Packs the logs of a call into one tensor, because every fetched tensor costs a round trip."""

    def __init__(self, replica_step: ReplicaStep) -> None:
        self._variables = replica_step.metrics
        self._reader = MetricReader(replica_step.model, replica_step.returned, replica_step.loss_counts)

    def initial_metrics(self) -> list[tf.Tensor]:
        """The metric variables' values before a step; called while a call is traced."""
        return [
            tf.constant(initial, variable.dtype)
            for initial, variable in zip(self._reader.initial_values, self._variables)
        ]

    @staticmethod
    def pack(staleness: tf.Tensor, rows: Sequence[Sequence[Any]]) -> tf.Tensor:
        """A row of float64 for each step: its staleness, its number of examples, its metrics."""
        fused = CallLogs.fuse([tensor for row in rows for tensor in row])
        return tf.concat([tf.cast(staleness, tf.float64)[:, None], tf.reshape(fused, [len(rows), -1])], 1)

    @staticmethod
    def fuse(tensors: Sequence[Any]) -> tf.Tensor:
        """Tensors of a row as one, which may stand for them in `pack`: float64 `[n]`."""
        return fuse([tf.cast(tensor, tf.float64) for tensor in tensors])

    def unpack(self, packed: np.ndarray) -> StepLogs:
        """Undoes `pack`."""
        shapes = [initial.shape for initial in self._reader.initial_values]
        sizes = [1, 1, *(math.prod(shape) for shape in shapes)]
        staleness, num_examples, *parts = np.split(packed, np.cumsum(sizes)[:-1], axis=1)
        values = tuple(part.reshape(len(packed), *shape) for part, shape in zip(parts, shapes))
        whole = [column[:, 0].astype(np.int64) for column in (num_examples, staleness)]
        return StepLogs(whole[0], whole[1], MetricRows(self._reader, values))

    @staticmethod
    def join(logs: Sequence[StepLogs]) -> StepLogs:
        """The joint report of all replicas on the same synchronous steps."""
        together = reduce(StepLogs.beside, logs)
        return replace(together, metrics=together.metrics.count_as_keras(together.num_examples))


#: The next `(batch, seeds)` of a replica.
NextBatch = Callable[[], tuple[Any, tf.Tensor]]

#: Computes a step between a pull and a push: pulled values, the next batches, metrics to add to -> the step in phases,
#: most often one.
Compute = Callable[[Pulled, NextBatch, list[tf.Tensor]], RunningStep]


def own_step(replica_step: ReplicaStep, store: ParameterStore, local_steps: int) -> Compute:
    """The step of a replica that pushes its own gradients, clipped; several batches can make one step.

    After DistBelief's Downpour SGD (Dean et al., 2012) with n_fetch = n_push: a worker continues by plain gradient
    descent on a copy, adds up its gradients, and pushes their sum. With more than one batch this is a
    different algorithm than asynchronous training, with fewer bytes and more staleness; for plain SGD with a single
    worker it is the same.
    """
    updates = replica_step.updates

    def clipped(output: ReplicaOutput) -> ReplicaOutput:
        return replace(output, gradients=updates.clip(output.gradients, output.phase))

    def one(pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        running = store.run_step(replica_step, pulled, *next_batch(), metrics)
        fresh: Any = None
        for _ in range(updates.num_phases):
            fresh = yield clipped(running.send(fresh))

    def several(pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        sums = output = clipped(next(store.run_step(replica_step, pulled, *next_batch(), metrics)))
        learning_rate = tf.identity(store.learning_rate(pulled.global_step))
        for _ in range(local_steps - 1):
            pulled = replace(
                pulled,
                trainable=[_moved(*pair, learning_rate) for pair in zip(pulled.trainable, output.gradients)],
                state=_newer(pulled.state, output.state),
            )
            output = clipped(next(store.run_step(replica_step, pulled, *next_batch(), output.metrics)))
            sums = replace(
                output,
                gradients=[
                    _sum(*pair, is_row_wise=i in replica_step.row_wise)
                    for i, pair in enumerate(zip(sums.gradients, output.gradients))
                ],
                state=_newer(sums.state, output.state),
                num_examples=sums.num_examples + output.num_examples,
                overflow=None if output.overflow is None else tf.maximum(sums.overflow, output.overflow),
            )
        yield sums

    return several if local_steps > 1 else one


def _moved(value: Any, gradient: Change, learning_rate: tf.Tensor) -> Any:
    """A value after one step of gradient descent; a table whose rows are fetched is read anew in every step."""
    if gradient is None or value is None:
        return value
    learning_rate = tf.cast(learning_rate, value.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        changes = learning_rate * tf.cast(gradient.values, value.dtype)
        return tf.tensor_scatter_nd_sub(value, gradient.indices[:, None], changes)
    return value - learning_rate * tf.cast(gradient, value.dtype)


def _newer(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [before if after is None else after for before, after in zip(old, new)]


def _sum(one: Change, other: Change, *, is_row_wise: bool) -> Change:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.Tensor):
        return one + other
    both = tf.IndexedSlices(tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0))
    return sum_duplicates(both) if is_row_wise else both


@dataclass(eq=False)
class Calls(abc.ABC):
    """Calls of a given number of steps, each traced when it is first needed.

    Attributes:
        trace_secs: what tracing took, by the number of steps.
    """

    trace_secs: dict[int, float] = field(default_factory=dict, init=False)
    _functions: dict[int, tf.types.experimental.ConcreteFunction] = field(default_factory=dict, init=False)

    def traced(self, num_steps: int) -> bool:
        return num_steps in self._functions

    def function(self, num_steps: int) -> tf.types.experimental.ConcreteFunction:
        if num_steps not in self._functions:
            began = time.perf_counter()
            self._functions[num_steps] = self._trace(num_steps)
            self.trace_secs[num_steps] = time.perf_counter() - began
        return self._functions[num_steps]

    @abc.abstractmethod
    def _trace(self, num_steps: int) -> tf.types.experimental.ConcreteFunction: ...


@dataclass(eq=False)
class UnrolledCalls(Calls):
    """Calls of one replica that pushes its own gradients: (iterator) -> a float64 matrix that `logs` unpacks.

    Attributes:
        iterator_spec: type of the iterator over `(batch, seeds)` that a call takes.
        local_steps: batches of one step; see `own_step`.
        num_ahead: see `run_steps`.
    """

    replica_step: ReplicaStep
    store: ParameterStore
    iterator_spec: Any
    local_steps: int = ParameterServerOptions.local_steps
    num_ahead: int = 0

    def __post_init__(self) -> None:
        self.logs = CallLogs(self.replica_step)

    def _trace(self, num_steps: int) -> tf.types.experimental.ConcreteFunction:
        compute = own_step(self.replica_step, self.store, self.local_steps)

        def call(iterator: Any) -> tf.Tensor:
            replica = Replica(self.store, iterator, compute)
            return run_steps([replica], num_steps, self.logs, num_ahead=self.num_ahead)[0]

        return function_for_tasks(call, self.iterator_spec)


@dataclass(frozen=True)
class Replica:
    """A replica while a call is traced, with its iterator over `(batch, seeds)`."""

    store: ParameterStore
    iterator: Any
    compute: Compute
    #: It computes there; on the device of the caller if empty.
    device: str = ""

    def next_batch(self) -> tuple[Any, tf.Tensor]:
        """The next `(batch, seeds)`, on the device of the iterator."""
        with tf.device(None):
            return next_of(self.iterator)


def run_steps(
    replicas: Sequence[Replica],
    num_steps: int,
    logs: CallLogs,
    exchange: Callable[[list[ReplicaOutput], list[Pulled]], list[BlockUpdates]] | None = None,
    num_ahead: int = 0,
) -> list[tf.Tensor]:
    """Unrolls steps while a call is traced: pull, compute, push, for each phase.

    Args:
        replicas: of this process; all of them take part in each step.
        exchange: turns the outputs of synchronous replicas into the changes that each applies to its own store; None
            for a replica that pushes its own.
        num_ahead: steps that pull and compute before the push of a step is applied, so that nothing waits for the
            network; only for steps with one phase.

    Returns:
        The packed logs of each replica, see `CallLogs.pack`.
    """
    rows: list[list[list[Any]]] = [[] for _ in replicas]
    staleness: list[list[tf.Tensor]] = [[] for _ in replicas]
    # A server works in the order of the trace: a pull that is traced before a push does not wait for it.
    computed: deque[tuple[list[Pulled], list[ReplicaOutput]]] = deque()

    def push(pulled: list[Pulled], outputs: list[ReplicaOutput]) -> None:
        changes = None if exchange is None else exchange(outputs, pulled)
        for i, (replica, output) in enumerate(zip(replicas, outputs)):
            with tf.device(replica.device or None):
                if changes is None:
                    step = replica.store.push(output, pulled[i])
                else:
                    step = replica.store.apply(changes[i], output.phase)
            if output.phase == 0:
                # Both steps are on the first server, and their difference stays there until the end of the call: a
                # tensor that travels in every step costs more than the arithmetic of a small model.
                with tf.device(replica.store.devices[0] or None):
                    staleness[i].append(step - 1 - pulled[i].global_step)

    for _ in range(num_steps):
        pulled, running = [], []
        for replica in replicas:
            with tf.device(replica.device or None):
                pulled.append(replica.store.pull())
                running.append(replica.compute(pulled[-1], replica.next_batch, logs.initial_metrics()))
        for phase in range(replicas[0].store.updates.num_phases):
            outputs = []
            for i, replica in enumerate(replicas):
                with tf.device(replica.device or None):
                    fresh: Any = replica.store.pull_again(phase) if phase else None
                    outputs.append(running[i].send(fresh))
            computed.append((pulled, outputs))
            if len(computed) > num_ahead:
                push(*computed.popleft())
        for i, output in enumerate(outputs):
            rows[i].append([output.num_examples, *output.metrics])
    for late in computed:
        push(*late)
    packed = []
    for i, replica in enumerate(replicas):
        with tf.device(replica.store.devices[0] or None):
            of_steps = tf.stack(staleness[i])
        with tf.device(replica.device or None):
            packed.append(logs.pack(of_steps, rows[i]))
    return packed


class CallSizer:
    """Decides how many steps the next call unrolls.

    With `auto` it starts with single steps and then takes four times as many at a time, so that few sizes are needed.
    It stops growing when calls would become long, or would take long to prepare, or when larger ones would not save the
    time that a new size costs: it has to be traced, and prepared by every worker. What that costs follows from the
    present size: one part is the same for all sizes, the other is in proportion to the time of the trace. The overhead
    of a call follows from the last two sizes. It is measured for as long as a size took to prepare; single steps only
    for a moment, if there are many of them left. If the end of training is not known, it is assumed to last as long
    again as it has so far (as in ski rental).

    Args:
        steps_per_call: a fixed number of steps, or None for `auto`.
        num_workers: workers that share the steps.
        last_step: the global step that training is to end at; None if nobody knows.

    Attributes:
        trace_secs: what tracing calls took, by their number of steps; see `Calls`.
    """

    def __init__(self, steps_per_call: int | None, num_workers: int, last_step: int | None = None) -> None:
        self.trace_secs: Mapping[int, float] = {}
        self._fixed = steps_per_call
        self.num_workers = num_workers
        self._last_step = last_step
        self._step = 0
        self._auto = 1
        #: The cost of preparing calls of the present size, and whether tasks are to prepare them again.
        self._cost_secs = 0.0
        self._prepares_again = False
        self._trained_secs = 0.0
        self._trained_steps = 0
        #: The duration of a step with the previous size; after a change of the cluster, its ratio to the present one.
        self._step_secs_before: float | None = None
        self._times_slower: float | None = None

    @property
    def steps_per_call(self) -> int:
        """The steps of a call, if enough steps are left."""
        return self._fixed or self._auto

    @property
    def longest_secs(self) -> float:
        """The seconds that a chosen call may take; the more workers, the longer, so that one chief can drive them."""
        return max(AUTO_CALL_SECS, _SECS_PER_WORKER * self.num_workers)

    @property
    def _steps_left(self) -> int:
        return self._trained_steps if self._last_step is None else self._last_step - self._step

    def begin_at(self, step: int) -> None:
        self._step = step

    def resize(self, num_workers: int) -> None:
        """Measures anew, since as many workers share the steps from now on, or tasks prepare the calls again.

        The rate need not follow their number: the chief, servers or cores may be the limit. The ratio between a step at
        the previous size and one at the present size is assumed to stay the same.
        """
        if self._step_secs_before is not None:
            self._times_slower = None
            if self._trained_secs >= _AUTO_FIRST_SECS and self._trained_steps:
                self._times_slower = self._step_secs_before * self._trained_steps / self._trained_secs
            self._step_secs_before = None
        self.num_workers = num_workers
        self._trained_secs, self._trained_steps = 0.0, 0
        self.prepare_again()

    def prepare_again(self) -> None:
        """Lets the cost of the present calls, which tasks prepare again, replace the earlier one."""
        self._prepares_again = True

    def next_size(self, remaining: int) -> int:
        """The steps of the next call when `remaining` steps are left to assign."""
        if self._fixed is not None and remaining >= self._fixed:
            return self._fixed
        at_most, size = min(self.steps_per_call, remaining), 1
        if self._fixed is None:
            # Near the end every worker still gets its share.
            at_most = min(at_most, math.ceil(remaining / self.num_workers))
        while size * GROWTH <= at_most:
            size *= GROWTH
        return size

    def observe(self, num_steps: int, secs: float, *, warming_up: bool) -> None:
        """Learns from finished steps of all workers; `warming_up` if functions were traced or prepared meanwhile."""
        self._step += num_steps
        if warming_up:
            # What it cost before would count once more for each change of the cluster.
            self._cost_secs = secs + (0.0 if self._prepares_again else self._cost_secs)
            self._prepares_again = False
            return
        self._trained_secs += secs
        self._trained_steps += num_steps
        # Steps may have finished before they were waited for: the duration of one is only known over a longer time.
        if self._trained_steps:
            self._decide(self._trained_secs / self._trained_steps)

    def _decide(self, step_secs: float) -> None:
        """Takes calls of another size if they are expected to pay; `step_secs` of all workers together."""
        is_known = self._trained_secs >= self._cost_secs or self._is_only_beginning(step_secs)
        if is_known and self._pays(GROWTH * self._auto, step_secs):
            self._step_secs_before, self._times_slower = step_secs, None
            self._begin_with(GROWTH * self._auto)

    def _begin_with(self, size: int) -> None:
        self._auto = size
        self._cost_secs, self._trained_secs, self._trained_steps = 0.0, 0.0, 0

    def _is_only_beginning(self, step_secs: float) -> bool:
        """Tells whether single steps are known to be the smaller part of what is left to train."""
        if self._last_step is None or self._auto > 1 or self._trained_secs < _AUTO_FIRST_SECS:
            return False
        # Two more sizes are to come.
        return self._steps_left * step_secs >= self._cost_of(GROWTH) + self._cost_of(GROWTH**2)

    def _pays(self, larger: int, step_secs: float) -> bool:
        """Tells whether calls of that many steps are short, soon prepared, and save more than they cost to prepare."""
        if larger > _AUTO_MAX_STEPS or larger * step_secs * self.num_workers > self.longest_secs:
            return False
        if self._cost_of(larger) > AUTO_PREPARE_SECS:
            return False
        before = self._step_secs_before if self._times_slower is None else self._times_slower * step_secs
        if before is None:
            # Most of the time of a single step may be that of its call.
            return True
        return (before - step_secs) / GROWTH * self._steps_left >= self._cost_of(larger)

    def _cost_of(self, size: int) -> float:
        """The seconds that preparing calls of another size takes."""
        present = self.steps_per_call
        of_steps = min(self._cost_secs, _SECS_PER_TRACED * self.trace_secs.get(present, math.inf))
        if present == 1:
            of_steps *= _SHARE_OF_STEP
        return self._cost_secs + of_steps * (size / present - 1)


class WorkerIterators:
    """Iterators over the datasets that `make_dataset` makes for each worker, on the task of the caller."""

    def __init__(self, make_dataset: Callable[[int], Any]) -> None:
        self._make_dataset = make_dataset
        self._iterators: dict[int, Any] = {}
        #: The batches that were read of the present iterator of each worker.
        self.num_read: Counter[int] = Counter()
        #: The number of the split that it reads, see `Splits.num_given`.
        self._splits_read: Counter[int] = Counter()

    def of(self, worker: int, splits: Splits | None = None) -> Any:
        if worker not in self._iterators:
            self._iterators[worker] = iterator_over(self._make_dataset(worker))
            self.num_read[worker] = 0
            if splits is not None:
                self._splits_read[worker] = splits.num_given(worker)
        return self._iterators[worker]

    def read(self, worker: int, splits: Splits | None, call: Callable[[Any], T], num_batches: int = 1) -> T:
        """Calls a function with the iterator of a worker, which continues with its next split at the end of one.

        Args:
            splits: of the data; None if it is endless.
            call: reads so many batches, of one split.

        Raises:
            NothingToRead: there is no split for the worker now.
            DataSourceError: the source of the split cannot be reached.
            tf.errors.OpError: from `call`; it names the split.
        """
        if splits is None:
            result = call(self.of(worker))
            self.has_read(worker, splits, num_batches)
            return result
        while True:
            if splits.have_lengths:
                splits.reserve(worker, num_batches)
            self.change_split(worker, splits)
            try:
                result = call(self.of(worker, splits))
            except tf.errors.OutOfRangeError:
                splits.finish(worker)
            except tf.errors.OpError as error:
                split = splits.split_of(worker)
                if split is None or may_be_lost(error):
                    raise
                if (reason := why_unreadable(error, split)) is None or not splits.skip(worker, reason):
                    raise with_place(error, split) from error
            else:
                self.has_read(worker, splits, num_batches)
                return result

    def change_split(self, worker: int, splits: Splits) -> None:
        """Drops an iterator over another split than the worker has by now."""
        has_none = splits.split_of(worker) is None and not splits.are_endless
        if has_none or self._splits_read[worker] != splits.num_given(worker):
            self.forget(worker)

    def has_read(self, worker: int, splits: Splits | None, num_batches: int) -> None:
        """Counts batches that a worker has read."""
        self.num_read[worker] += num_batches
        if splits is not None:
            splits.advance(worker, num_batches)
            if splits.split_of(worker) is None and not splits.are_endless:
                # These were its last batches.
                self.forget(worker)

    def read_steps(
        self, worker: int, splits: Splits | None, calls: Mapping[int, Callable[[Any], np.ndarray]]
    ) -> np.ndarray:
        """The rows of as many steps as the largest of `calls` has, which are by their numbers of steps.

        If the split of the worker ends before, smaller calls take the rest of it, and the next split. There are fewer
        rows if no other split follows, or the worker is lost in between: the next call is told.
        """
        rows: list[np.ndarray] = []
        while (left := max(calls) - sum(map(len, rows))) > 0:
            try:
                if splits is not None:
                    left = splits.reserve(worker, left)
                num_steps = max(n for n in calls if n <= left)
                rows.append(self.read(worker, splits, calls[num_steps], num_steps))
            except (NothingToRead, tf.errors.OpError) as error:
                if not rows or (isinstance(error, tf.errors.OpError) and not may_be_lost(error)):
                    raise
                break
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def of_all(self, workers: Sequence[int], coordinator: Coordinator, splits: Splits | None = None) -> list[Any]:
        """The iterators of several idle workers, each of which makes its own meanwhile.

        Raises:
            tf.errors.OpError: a worker is lost, or its data cannot be read.
        """
        missing = [worker for worker in workers if worker not in self._iterators]
        for worker in missing:
            coordinator.start_on(worker, partial(self.of, splits=splits))
        for finished in [coordinator.next_finished() for _ in missing]:
            finished.outcome.result()
        return [self._iterators[worker] for worker in workers]

    def forget(self, worker: int) -> None:
        """Drops the iterator of a worker: its data starts over."""
        self._iterators.pop(worker, None)

    def clear(self) -> None:
        self._iterators.clear()
