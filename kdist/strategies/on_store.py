"""Strategies that keep their values in a `ParameterStore`, in this process or on parameter servers.

`StoreStrategy` runs steps, and `StoreValues` reads, writes, saves and restores the store.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsInt, TypeVar

import numpy as np
import tensorflow as tf

from kdist.cluster.spec import Cluster, ClusterChange, ClusterShape, Task
from kdist.data.base import make_dataset
from kdist.data.shares import SharedData
from kdist.data.splits import Splits
from kdist.model.names import GLOBAL_STEP
from kdist.parameters.store import ParameterStore
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.values.histograms import histograms_of
from kdist.strategies.base import PendingResize, Strategy, TrainingSpec, Values
from kdist.strategies.call_logs import StepLogs
from kdist.strategies.call_sizer import CallSizer
from kdist.strategies.prepared_training import PreparedTraining
from kdist.strategies.sweeper import Sweeper
from kdist.threads import in_thread

T = TypeVar("T")


class StoreStrategy(Strategy):
    """A strategy that keeps its values in a `ParameterStore`. Subclasses set the first attributes in `start`."""

    _prepared: PreparedTraining
    _sizer: CallSizer
    #: See `PreparedTraining.trace_dataset`.
    _make_dataset: tf.types.experimental.ConcreteFunction
    #: Logs of finished steps that `run` has not returned yet.
    _ahead: StepLogs | None = None
    #: When the last run ended, if it left steps in flight.
    _last_end: float | None = None
    #: The time of the present run in which it waited for tasks that are lost, or found out which.
    _waited_secs = 0.0
    _sweeper: Sweeper | None = None
    #: The other tasks, if there are any.
    _cluster: Cluster | None = None

    def _hold(self, stores: Sequence[ParameterStore]) -> None:
        """Keeps the values in these stores, which are alike; rows of dynamic tables are evicted from now on."""
        self._store = stores[0]
        self.values = StoreValues(stores, self, self._prepared.spec)
        #: The batches of each worker before those of its iterator.
        self._first_batches: dict[int, int] = {}
        if (sweep := self._store.sweep) is not None:
            self._sweeper = Sweeper(sweep, partial(self.start_aside, kind="sweep"), self._outcome)

    def _dataset(self, worker: int) -> Any:
        """The dataset of a worker, on the task of the caller."""
        spec, num_workers, step = self._prepared.spec, self._prepared.num_workers, self._begins_at(worker)
        first_batch = self._first_batches[worker] = (step - spec.count.begin) * self.batches_per_step // num_workers
        index = worker if spec.data.splits is not None else self._number_of(worker)
        return make_dataset(self._make_dataset, spec.data, index, num_workers, step, first_batch)

    def _number_of(self, worker: int) -> int:
        """The number of a worker, or replica, among those that share the data."""
        return worker

    def _begins_at(self, worker: int) -> int:
        """The global step at which a worker begins to read."""
        return self.values.global_step()

    def at_rest(
        self, function: Callable[[], T], kind: Hashable = None, *, traces: bool = False, of_files: bool = False
    ) -> T:
        """Calls a function that uses the stored values when nothing is in flight, so that no step changes them.

        Args:
            kind: identifies the TensorFlow functions that it calls.
            traces: whether it may trace new ones.
            of_files: whether it may fail because of a file, not of a task.
        """
        self._wait_for_sweep()
        return function()

    def start_aside(self, function: Callable[[], T], kind: Hashable) -> Future[T]:
        """Calls a function in a thread, while training continues."""
        return in_thread(function)

    def wait_for(self, outcome: Future[T]) -> T:
        """Waits for the result of `start_aside`."""
        return self._outcome(outcome)

    def _outcome(self, started: Future[T]) -> T:
        return started.result()

    def _wait_for_sweep(self) -> None:
        if self._sweeper is not None:
            self._sweeper.wait()

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        self.warming_up, self._waited_secs = False, 0.0
        # Steps that were started before count from then on.
        started = self._last_end if self._last_end is not None else time.perf_counter()
        num_finished = 0
        may_begin = max(num_steps, may_begin or 0)
        while self.steps_ahead < num_steps:
            if self._sweeper is not None:
                self._sweeper.go_on()
            more = self._next_logs(may_begin - self.steps_ahead, interrupted)
            if more is None:
                break
            self._ahead = more if self._ahead is None else self._ahead + more
            num_finished += more.num_steps
        if is_interrupted := interrupted():
            self.drain()
        logs = self._ahead
        if logs is not None and logs.num_steps > num_steps and not is_interrupted:
            logs, self._ahead = logs[:num_steps], logs[num_steps:]
        else:
            self._ahead = None
        now = time.perf_counter()
        self._observe(num_finished, now - started - self._waited_secs)
        self._last_end = None if self.is_idle else now
        return logs

    def _observe(self, num_steps: int, secs: float) -> None:
        """Learns from finished steps how large calls should be."""
        self._sizer.observe(num_steps, secs, warming_up=self.warming_up)

    @abc.abstractmethod
    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        """Waits for the next call to finish, and sets `warming_up` when it traces a function.

        Args:
            may_begin: steps that may be in flight, including all that are.

        Returns:
            Logs of the call; None if nothing is in flight and nothing may be started.
        """

    @property
    def steps_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.num_steps

    def drain(self) -> None:
        while (logs := self._in_flight_logs()) is not None:
            self._ahead = logs if self._ahead is None else self._ahead + logs

    @property
    def is_idle(self) -> bool:
        return self.steps_ahead == 0 and self._num_in_flight == 0

    @property
    def _num_in_flight(self) -> int:
        """Steps that were started and have not finished, as far as is known. Strategies whose calls block have none."""
        return 0

    def _in_flight_logs(self) -> StepLogs | None:
        """Waits for the next call in flight; None if there is none."""
        return None

    def _with_shares(self, spec: TrainingSpec) -> TrainingSpec:
        """The same training, with data that any number of workers can read, if that is possible."""
        data, number = spec.data, self._prepared.num_workers
        if data.splits is not None or not self._can_share or data.share_end(0, number, 1) is None:
            return spec
        # The count of `spec` may be that of epochs on another number of workers.
        begin, batches_per_step = self._prepared.spec.count.begin, self.batches_per_step

        def batches_at(step: int) -> int:
            return max(0, step - begin) * batches_per_step // number

        begins = self._batches_read(number, batches_at)
        shared = SharedData(
            data, number, begins, batches_at, mixes_epochs=self.is_asynchronous, in_step=self.takes_equal_steps
        )
        return replace(spec, data=shared)

    @property
    def _can_share(self) -> bool:
        """True if workers may read different numbers of batches."""
        return True

    def _batches_read(self, number: int, batches_at: Callable[[int], int]) -> Sequence[int]:
        """The batches that each of `number` workers has read; `batches_at` is that number, about, at a step."""
        return [batches_at(self.values.global_step())] * number

    @property
    def _splits(self) -> Splits | None:
        """The splits that workers read one after the other, if the data may end."""
        return self._prepared.spec.data.splits

    def values_were_set(self, global_step: SupportsInt | None) -> None:
        """Continues at another step, if values were set with a global step among them: those before no longer count."""
        if global_step is not None:
            self._ahead = self._last_end = None
            self._sizer.begin_at(int(global_step))

    def tasks_to_leave(self) -> set[Task]:
        return set() if self._cluster is None else self._cluster.tasks_to_leave()

    def tasks_to_join(self) -> ClusterChange | None:
        if self._cluster is None or not (waiting := self._cluster.tasks_to_join()):
            return None
        shape = self._cluster.spec.shape
        return ClusterChange(workers=shape.num_workers + waiting["worker"], ps=shape.num_ps + waiting["ps"] or None)

    def refuse_to_join(self, why: str) -> None:
        if self._cluster is not None:
            self._cluster.refuse_to_join(why)

    @property
    def meeting_place(self) -> str | None:
        return None if self._cluster is None else self._cluster.meeting_place

    def begin_resize(self, change: ClusterChange) -> PendingResize:
        if self._cluster is None:
            return super().begin_resize(change)
        spec = self._cluster.spec
        before, after = spec.shape, change.applied_to(spec)
        if change.leave is None:
            self._check_shape(after)
        moved = [] if change.move is None else [change.move]
        joining, leaving = {"ps": len(moved), "worker": 0}, list[Task](moved)
        if change.leave is not None:
            leaving.append(change.leave)
        jobs = ("ps", after.num_ps, before.num_ps), ("worker", after.num_workers, before.num_workers)
        for job, number, had in () if change.leave is not None else jobs:
            joining[job] += max(0, number - had)
            staying = [task for task in spec.of_job(job) if task not in moved]
            leaving += staying[len(staying) - max(0, had - number) :]
        self._cluster.check_leaving(leaving)
        started = self._cluster.begin_to_add(joining["ps"], joining["worker"]) if any(joining.values()) else []
        return PendingResize(before, after, started, leaving)

    def _check_shape(self, shape: ClusterShape) -> None:
        """Refuses, with a `ConfigError`, a shape that the options of the strategy do not allow."""

    def may_finish(self, resize: PendingResize) -> bool:
        return self._cluster is None or self._cluster.are_ready(resize.joining)

    def cancel_resize(self, resize: PendingResize) -> None:
        if self._cluster is not None and resize.joining:
            self._cluster.dismiss(resize.joining)

    @property
    def addresses(self) -> Mapping[Task, str]:
        return {} if self._cluster is None else {t: self._cluster.spec.address(t) for t in self._cluster.spec.tasks}


class StoreValues(Values):
    """The values of a `ParameterStore`, or of several that are alike.

    Args:
        stores: the first one is read; all are written.
        strategy: changes them, and lets nothing else use them meanwhile.
        spec: of the training; its seed and the state of its data are saved with the values.
    """

    def __init__(self, stores: Sequence[ParameterStore], strategy: StoreStrategy, spec: TrainingSpec) -> None:
        self._store = stores[0]
        self._stores = stores
        self._strategy = strategy
        self._spec = spec
        self.shapes = {**self._store.values.shapes, **self._store.dynamic.shapes}
        self.by_rows = self._store.files.by_rows
        self._histograms: Callable[[], dict[str, np.ndarray]] | None = None

    def global_step(self) -> int:
        return self._strategy.at_rest(self._store.counters.global_step, "global_step")

    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        for portions in (self._store.values.portions(names), self._store.dynamic.read(names)):
            read = iter(portions)
            # Keras often uses the values, and traces more functions.
            while (portion := self._strategy.at_rest(partial(next, read, None), "read", traces=True)) is not None:
                yield portion

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        def write() -> None:
            for store in self._stores:
                store.write(values)

        self._strategy.at_rest(write, ("write", *sorted(values)))
        self._strategy.values_were_set(values.get(GLOBAL_STEP))

    def histograms(self) -> dict[str, np.ndarray]:
        def read() -> dict[str, np.ndarray]:
            self._histograms = self._histograms or histograms_of(self._store.values)
            return self._histograms()

        return self._strategy.at_rest(read, "histograms", traces=True)

    def next_interval(self, since: int | None) -> int | None:
        return self._strategy.at_rest(lambda: self._store.files.next_interval(since), "next_interval")

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        def begin() -> Callable[[], None]:
            step = self._store.counters.global_step()
            return self._store.files.begin_save(prefix, self._spec.beside_values(step), since, copies=aside)

        def write() -> None:
            begin()()

        if aside:
            return self._strategy.start_aside(self._on_files(begin, ("begin_save", since is None)), "finish_save")
        written: Future[None] = Future()
        written.set_result(self._on_files(write, ("save", since is None)))
        return written

    def wait_for(self, written: Future[None]) -> None:
        self._strategy.wait_for(written)

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        def restore() -> int:
            for store in self._stores:
                store.restore(path, deltas)
            return self._store.counters.global_step()

        self._strategy.values_were_set(self._on_files(restore, ("restore", bool(deltas))))

    def count_rows(self) -> None:
        if self._store.dynamic:
            self._strategy.at_rest(self._store.dynamic.count, "count_rows")

    def use_averages(self) -> None:
        self._strategy.at_rest(self._store.use_averages, "use_averages")

    def _on_files(self, function: Callable[[], T], kind: Hashable) -> T:
        return self._strategy.at_rest(function, kind, traces=True, of_files=True)
