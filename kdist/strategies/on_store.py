"""Strategies that keep their values in a `ParameterStore`: they run steps, and read, write, save and restore it."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import tensorflow as tf

from kdist.cluster.spec import Task
from kdist.data.base import iterator_over
from kdist.data.split_data import why_unreadable, with_place
from kdist.data.splits import Splits
from kdist.dispatch.coordinator import Coordinator
from kdist.dispatch.worker_threads import may_be_lost
from kdist.model.names import DATA_STATE, EPOCHS_BEGIN, GLOBAL_STEP, SEED
from kdist.parameters.placement.plan import PlacementPlan, wrong_id
from kdist.parameters.store import ParameterStore
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.values.histograms import histograms_of
from kdist.strategies.base import Strategy, Values
from kdist.strategies.calls import CallSizer, StepLogs
from kdist.strategies.prepared_training import PreparedTraining
from kdist.threads import in_thread

T = TypeVar("T")


class StoreStrategy(Strategy):
    """A strategy that keeps its values in a `ParameterStore`. Subclasses set the first attributes in `start`."""

    _prepared: PreparedTraining
    _sizer: CallSizer
    _values: Values
    #: See `PreparedTraining.trace_dataset`.
    _make_dataset: tf.types.experimental.ConcreteFunction
    #: Logs of finished steps that `run` has not returned yet.
    _ahead: StepLogs | None = None
    #: When the last run ended, if it left steps in flight.
    _last_end: float | None = None
    _sweeper: Sweeper | None = None

    def _hold(self, stores: Sequence[ParameterStore]) -> None:
        """Keeps the values in these stores, which are alike; rows of dynamic tables are evicted from now on."""
        self._store = stores[0]
        self._values = StoreValues(stores, self)
        if (sweep := self._store.sweep) is not None:
            self._sweeper = Sweeper(sweep, partial(self.start_aside, kind="sweep"), self._outcome)

    def _dataset(self, worker: int) -> Any:
        """The data of a worker, on the device of the caller."""
        return self._prepared.make_dataset(self._make_dataset, worker, self._begins_at(worker), self.batches_per_step)

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
        self.warming_up = False
        # Steps that were started before count from then on.
        started = self._last_end if self._last_end is not None else time.perf_counter()
        num_finished = 0
        may_begin = max(num_steps, may_begin or 0)
        while self._num_ahead < num_steps:
            if self._sweeper is not None:
                self._sweeper.go_on()
            more = self._next_logs(may_begin - self._num_ahead, interrupted)
            if more is None:
                break
            self._keep(more)
            num_finished += more.num_steps
        if is_interrupted := interrupted():
            self.drain()
        logs = self._ahead
        if logs is not None and logs.num_steps > num_steps and not is_interrupted:
            logs, self._ahead = logs[:num_steps], logs[num_steps:]
        else:
            self._ahead = None
        now = time.perf_counter()
        self._observe(num_finished, now - started)
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

    def _keep(self, logs: StepLogs) -> None:
        self._ahead = logs if self._ahead is None else self._ahead + logs

    @property
    def _num_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.num_steps

    def drain(self) -> int:
        while (logs := self._in_flight_logs()) is not None:
            self._keep(logs)
        return self._num_ahead

    @property
    def is_idle(self) -> bool:
        return self._num_ahead == 0 and self._num_in_flight == 0

    @property
    def _num_in_flight(self) -> int:
        """Steps that were started and have not finished, as far as is known. Strategies whose calls block have none."""
        return 0

    def _in_flight_logs(self) -> StepLogs | None:
        """Waits for the next call in flight; None if there is none."""
        return None

    @property
    def values(self) -> Values:
        return self._values

    def beside_values(self) -> dict[str, np.ndarray]:
        """The content of a checkpoint beside the values, by name."""
        spec = self._prepared.spec
        beside = {
            SEED: np.array(spec.seed, np.int64),
            EPOCHS_BEGIN: np.array([spec.data_begins_at, spec.first_epoch], np.int64),
        }
        state = spec.data.state()
        return beside if state is None else {**beside, DATA_STATE: np.array(state, object)}

    @property
    def _splits(self) -> Splits | None:
        """The splits that workers read one after the other, if the data may end."""
        return self._prepared.spec.data.splits

    def values_were_set(self, global_step: int | None) -> None:
        """Continues at another step, if values were set with a global step among them."""
        if global_step is not None:
            self._continue_at(global_step)

    def _continue_at(self, step: int) -> None:
        """Training continues at another step: the steps before it no longer count."""
        self._ahead = self._last_end = None
        self._sizer.begin_at(step)


class StoreValues(Values):
    """The values of a `ParameterStore`, or of several that are alike.

    Args:
        stores: the first one is read; all are written.
        strategy: changes them, and lets nothing else use them meanwhile.
    """

    def __init__(self, stores: Sequence[ParameterStore], strategy: StoreStrategy) -> None:
        self._store = stores[0]
        self._stores = stores
        self._strategy = strategy
        self._histograms: Callable[[], dict[str, np.ndarray]] | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._store.values.shapes, **self._store.dynamic.shapes}

    @property
    def by_rows(self) -> frozenset[str]:
        return self._store.files.by_rows

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
        self._strategy.values_were_set(int(values[GLOBAL_STEP]) if GLOBAL_STEP in values else None)

    def histograms(self) -> dict[str, np.ndarray]:
        def read() -> dict[str, np.ndarray]:
            self._histograms = self._histograms or histograms_of(self._store.values)
            return self._histograms()

        return self._strategy.at_rest(read, "histograms", traces=True)

    def next_interval(self, since: int | None) -> int | None:
        return self._strategy.at_rest(lambda: self._store.files.next_interval(since), "next_interval")

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        def begin() -> Callable[[], None]:
            return self._store.files.begin_save(prefix, self._strategy.beside_values(), since, copies=aside)

        def write() -> None:
            begin()()

        if aside:
            return self._strategy.start_aside(self._on_files(begin, ("begin_save", since is None)), "finish_save")
        self._on_files(write, ("save", since is None))
        written: Future[None] = Future()
        written.set_result(None)
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


class WorkerIterators:
    """Iterators on workers.

    Args:
        make_dataset: worker -> its dataset, on the device of the caller.
        device_of: worker -> the device of its iterator; None for that of the caller.
    """

    def __init__(
        self,
        make_dataset: Callable[[int], Any],
        device_of: Callable[[int], str | None] = lambda worker: Task("worker", worker).device,
    ) -> None:
        self._make_dataset = make_dataset
        self._device_of = device_of
        self._iterators: dict[int, Any] = {}

    def of(self, worker: int) -> Any:
        """The iterator of a worker."""
        if worker not in self._iterators:
            with tf.device(self._device_of(worker)):
                self._iterators[worker] = iterator_over(self._make_dataset(worker))
        return self._iterators[worker]

    def read(self, worker: int, splits: Splits | None, call: Callable[[Any], T]) -> T:
        """Calls a function with the iterator of a worker, which continues with its next split at the end of one.

        Args:
            splits: of the data; None if it is endless.
            call: reads exactly one batch if there are splits.

        Raises:
            NothingToRead: there is no split for the worker now.
            DataSourceError: the source of the split cannot be reached.
            tf.errors.OpError: from `call`; it names the split.
        """
        if splits is None:
            return call(self.of(worker))
        while True:
            if splits.split_of(worker) is None:
                self.forget(worker)
            try:
                result = call(self.of(worker))
            except tf.errors.OutOfRangeError:
                splits.finish(worker)
            except tf.errors.OpError as error:
                split = splits.split_of(worker)
                if split is None or may_be_lost(error):
                    raise
                if (reason := why_unreadable(error, split)) is None or not splits.skip(worker, reason):
                    raise with_place(error, split) from error
            else:
                splits.advance(worker)
                if splits.split_of(worker) is None:
                    # It was this one batch.
                    self.forget(worker)
                return result

    def of_all(self, workers: Sequence[int], coordinator: Coordinator) -> list[Any]:
        """The iterators of several idle workers, each of which makes its own meanwhile.

        Raises:
            tf.errors.OpError: a worker is lost, or its data cannot be read.
        """
        missing = [worker for worker in workers if worker not in self._iterators]
        for worker in missing:
            coordinator.start_on(worker, self.of)
        for finished in [coordinator.next_finished() for _ in missing]:
            finished.outcome.result()
        return [self._iterators[worker] for worker in workers]

    def forget(self, worker: int) -> None:
        """Drops the iterator of a worker: its data starts over."""
        self._iterators.pop(worker, None)

    def clear(self) -> None:
        """Drops them all."""
        self._iterators.clear()


class Sweeper:
    """Sweeps again and again, in a thread, for at most a tenth of the time.

    Args:
        sweep: lets all servers evict rows.
        start: calls a function in a thread.
        wait_for: waits for it.
    """

    #: Seconds between two sweeps, at least.
    pause_secs: ClassVar[float] = 1.0

    def __init__(
        self,
        sweep: Callable[[], Any],
        start: Callable[[Callable[[], Any]], Future[Any]],
        wait_for: Callable[[Future[Any]], Any],
    ) -> None:
        self._sweep = sweep
        self._start = start
        self._wait_for = wait_for
        self._running: Future[Any] | None = None
        self._rests_until = time.monotonic() + self.pause_secs

    @property
    def is_sweeping(self) -> bool:
        return self._running is not None and not self._running.done()

    def go_on(self) -> None:
        """Begins to sweep if it is time to; returns at once."""
        if self.is_sweeping or time.monotonic() < self._rests_until:
            return
        self.wait()
        self._running = self._start(self._timed)

    def wait(self) -> None:
        """Waits until no sweep is running, so that rows stay as they are."""
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            self._wait_for(running)
        except tf.errors.OpError as error:
            # Whoever needs a server that is lost says so.
            if not may_be_lost(error):
                raise

    def _timed(self) -> None:
        started = time.monotonic()
        self._sweep()
        now = time.monotonic()
        self._rests_until = now + max(self.pause_secs, 9 * (now - started))


def in_terms_of_tables(error: tf.errors.OpError, plan: PlacementPlan | None) -> tf.errors.OpError:
    """The same error; if an id is not in its table, it names both, not the rows of a server."""
    found = None if plan is None else wrong_id(error.message, plan)
    return error if found is None else tf.errors.InvalidArgumentError(None, None, found)


def no_batch() -> ValueError:
    """The error for an empty dataset: since data is repeated, only an empty one ends."""
    return ValueError("the dataset has not a single batch")
