"""Calls: several replica steps in one function, so that they share the cost of one dispatch; and the iterators on the
workers that give them batches."""

from __future__ import annotations

import abc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import function_for_tasks
from kdist.config.schema import ParameterServerOptions
from kdist.data.base import iterator_over, next_of
from kdist.data.split_data import why_unreadable, with_place
from kdist.data.splits import NothingToRead, Splits
from kdist.dispatch.coordinator import Coordinator, may_be_lost
from kdist.model.replica_step import ReplicaStep
from kdist.model.updates import ReplicaOutput
from kdist.parameters.placement.messages import BlockUpdates, Message, Pulled
from kdist.parameters.store import ParameterStore
from kdist.strategies.call_logs import CallLogs
from kdist.strategies.worker_step import Compute, WorkerStep, own_step

T = TypeVar("T")
#: Applies what a step has computed.
_Push = Callable[[], None]


@dataclass(eq=False)
class Calls(abc.ABC):
    """Calls of a given number of steps, each traced when it is first needed.

    Attributes:
        trace_secs: what tracing took, by the number of steps; without that of a step that calls share.
    """

    trace_secs: dict[int, float] = field(default_factory=dict, init=False)
    _functions: dict[int, tf.types.experimental.ConcreteFunction] = field(default_factory=dict, init=False)

    def traced(self, num_steps: int) -> bool:
        return num_steps in self._functions

    def function(self, num_steps: int) -> tf.types.experimental.ConcreteFunction:
        if num_steps not in self._functions:
            began, shared_secs = time.perf_counter(), self._shared_secs
            self._functions[num_steps] = self._trace(num_steps)
            self.trace_secs[num_steps] = time.perf_counter() - began - (self._shared_secs - shared_secs)
        return self._functions[num_steps]

    @abc.abstractmethod
    def _trace(self, num_steps: int) -> tf.types.experimental.ConcreteFunction: ...

    @property
    @abc.abstractmethod
    def _worker_step(self) -> WorkerStep | None:
        """The function that the steps of longer calls run; None if they cannot."""

    @property
    def shares_step(self) -> bool:
        """True if the steps of longer calls are one function. Then a call that fails may say no more than that it was
        cancelled, whatever its error is."""
        return self._worker_step is not None

    @property
    def _shared_secs(self) -> float:
        return 0.0 if self._worker_step is None else self._worker_step.trace_secs


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
        def call(iterator: Any) -> tf.Tensor:
            if self._worker_step is not None:
                return self._run_worker_steps(self._worker_step, num_steps, iterator)
            compute = own_step(self.replica_step, self.store, self.local_steps)
            replica = Replica(self.store, iterator, compute)
            return run_steps([replica], num_steps, self.logs, num_ahead=self.num_ahead)[0]

        return function_for_tasks(call, self.iterator_spec)

    @cached_property
    def _worker_step(self) -> WorkerStep | None:
        """The function that the steps of longer calls run; None if they cannot.

        Steps of several batches need the learning rate meanwhile. To a GPU, all inputs of a function would be copied
        first, which is not possible for strings.
        """
        fits = self.replica_step.is_self_contained and self.store.is_remote and self.local_steps == 1
        if not fits or tf.config.list_logical_devices("GPU"):
            return None
        return WorkerStep(self.store, self.logs, own_step(self.replica_step, self.store, 1), self.store.pack)

    def _run_worker_steps(self, step: WorkerStep, num_steps: int, iterator: Any) -> tf.Tensor:
        """As `run_steps`, with the same function for each step."""
        logged = _ReplicaLogs(self.store)

        def push(messages: list[Message], begun_at: tf.Tensor) -> None:
            logged.pushed(self.store.push_packed(messages), begun_at)

        def computed() -> Iterator[_Push]:
            for _ in range(num_steps):
                gathered = self.store.gather()
                # A step alone reports its own error, see `WorkerStep`.
                messages, _, row = step(gathered, *next_of(iterator), unrolled=num_steps == 1)
                logged.rows.append([row])
                yield partial(push, messages, gathered.global_step)

        _push_in_order(computed(), self.num_ahead)
        return logged.packed()


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
    logged = [_ReplicaLogs(replica.store, replica.device) for replica in replicas]

    def push(pulled: list[Pulled], outputs: list[ReplicaOutput]) -> None:
        changes = None if exchange is None else exchange(outputs, pulled)
        for i, (replica, output) in enumerate(zip(replicas, outputs)):
            with tf.device(replica.device or None):
                if changes is None:
                    step = replica.store.push(output, pulled[i])
                else:
                    step = replica.store.apply(changes[i], output.phase)
            if output.phase == 0:
                logged[i].pushed(step, pulled[i].global_step)

    def computed() -> Iterator[_Push]:
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
                yield partial(push, pulled, outputs)
            for of_replica, output in zip(logged, outputs):
                of_replica.rows.append([output.num_examples, *output.metrics])

    _push_in_order(computed(), num_ahead)
    return [of_replica.packed() for of_replica in logged]


def _push_in_order(computed: Iterable[_Push], num_ahead: int) -> None:
    """Traces the pushes that steps yield, each after `num_ahead` later steps have pulled and computed."""
    waiting: deque[_Push] = deque()
    # A server works in the order of the trace: a pull that is traced before a push does not wait for it.
    for push in computed:
        waiting.append(push)
        if len(waiting) > num_ahead:
            waiting.popleft()()
    for push in waiting:
        push()


class _ReplicaLogs:
    """The logs of the steps of a replica, while a call is traced. Args: see `Replica`."""

    def __init__(self, store: ParameterStore, device: str = "") -> None:
        #: Of each step, see `CallLogs.pack`.
        self.rows: list[list[Any]] = []
        self._staleness: list[tf.Tensor] = []
        self._server, self._device = store.devices[0] or None, device or None

    def pushed(self, step: tf.Tensor, begun_at: tf.Tensor) -> None:
        """Notes the global step after a push, and the one that was pulled."""
        # Both are on the first server, and their difference stays there until the end of the call: a tensor that
        # travels in every step costs more than the arithmetic of a small model.
        with tf.device(self._server):
            self._staleness.append(step - 1 - begun_at)

    def packed(self) -> tf.Tensor:
        with tf.device(self._server):
            staleness = tf.stack(self._staleness)
        with tf.device(self._device):
            return CallLogs.pack(staleness, self.rows)


class WorkerIterators:
    """Iterators over the datasets that `make_dataset` makes for each worker, on the task of the caller."""

    def __init__(self, make_dataset: Callable[[int], Any]) -> None:
        self._make_dataset = make_dataset
        self._iterators: dict[int, Any] = {}
        #: The batches that were read of the present iterator of each worker.
        self.num_read: Counter[int] = Counter()
        #: The number of the split that it reads, see `Splits.num_given`.
        self._splits_read: Counter[int] = Counter()
        #: Workers whose last call was cancelled, which may be all that is left of the error of a step.
        self.cancelled: set[int] = set()

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
            tf.errors.OpError: from `call`; it names the split. After a `CancelledError`, the next call reads the same
                batches.
        """
        try:
            result = self._read(worker, splits, call, num_batches)
        except tf.errors.CancelledError:
            # It has read more than counts, and perhaps what it cannot read.
            self.forget(worker)
            self.cancelled.add(worker)
            raise
        self.cancelled.discard(worker)
        return result

    def _read(self, worker: int, splits: Splits | None, call: Callable[[Any], T], num_batches: int) -> T:
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
        self, worker: int, splits: Splits | None, calls: Mapping[int, Callable[[Any], np.ndarray]], num_steps: int
    ) -> np.ndarray:
        """The rows of so many steps, by the largest of `calls` that fit, which are by their numbers of steps.

        If the split of the worker ends before, smaller calls take the rest of it, and the next split. There are fewer
        rows if no other split follows, or the worker is lost in between: the next call is told.
        """
        rows: list[np.ndarray] = []
        while (left := num_steps - sum(map(len, rows))) > 0:
            try:
                if splits is not None:
                    left = splits.reserve(worker, left)
                size = max(n for n in calls if n <= left)
                rows.append(self.read(worker, splits, calls[size], size))
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
