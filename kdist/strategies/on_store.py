"""Strategies that keep their values in a `ParameterStore`, in this process or on parameter servers.

`StoreStrategy` runs steps, and `StoreValues` reads, writes, saves and restores the store. `ServersStrategy` adds the
cluster with the servers and workers, and the meaning of a task's error.
"""

from __future__ import annotations

import abc
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, SupportsInt, TypeVar

import numpy as np
import tensorflow as tf

from kdist.cluster.local import log_path
from kdist.cluster.processes.child import ended_by_itself, log_tail
from kdist.cluster.spec import Cluster, ClusterShape, Task
from kdist.config.schema import ServerOptions
from kdist.data.base import TrainingData, first_batch_reader, make_dataset
from kdist.data.splits import Splits
from kdist.dispatch.coordinator import OUT_OF_REACH, CallsCancelled, Coordinator, may_be_lost
from kdist.dispatch.health import Supervisor, describe_lost
from kdist.errors import ClusterError, TaskError, reason
from kdist.log import warn
from kdist.model.names import GLOBAL_STEP
from kdist.model.source import overrides_of
from kdist.parameters.optimizer import check_slots_only
from kdist.parameters.placement.messages import Wire
from kdist.parameters.store import ParameterStore
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.values.histograms import histograms_of
from kdist.strategies.base import Strategy, TrainingSpec, Values
from kdist.strategies.calls import Calls, CallSizer, StepLogs, WorkerIterators
from kdist.strategies.prepared_training import PreparedTraining, in_terms_of_tables, no_batch, prepare
from kdist.strategies.sweeper import Sweeper
from kdist.threads import in_thread

T = TypeVar("T")

#: Losses of workers in a row at the same place, after which it is named, and after which training ends.
_NAMED_AFTER, _ENDS_AFTER = 2, 3

#: Strategies, with their coordinators, whose tasks do not respond, and which this process may not kill: to delete a
#: handle to an object on a task, TensorFlow waits for the task.
_abandoned: list[Any] = []

_WORKER_IN_MESSAGE = re.compile(r"/job:worker/replica:0/task:(\d+)")


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
    _sweeper: Sweeper | None = None

    def _hold(self, stores: Sequence[ParameterStore]) -> None:
        """Keeps the values in these stores, which are alike; rows of dynamic tables are evicted from now on."""
        self._store = stores[0]
        self.values = StoreValues(stores, self, self._prepared.spec)
        if (sweep := self._store.sweep) is not None:
            self._sweeper = Sweeper(sweep, partial(self.start_aside, kind="sweep"), self._outcome)

    def _dataset(self, worker: int) -> Any:
        """The dataset of a worker, on the task of the caller."""
        spec, num_workers, step = self._prepared.spec, self._prepared.num_workers, self._begins_at(worker)
        first_batch = (step - spec.count.begin) * self.batches_per_step // num_workers
        return make_dataset(self._make_dataset, spec.data, worker, num_workers, step, first_batch)

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

    @property
    def _num_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.num_steps

    def drain(self) -> int:
        while (logs := self._in_flight_logs()) is not None:
            self._ahead = logs if self._ahead is None else self._ahead + logs
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
    def _splits(self) -> Splits | None:
        """The splits that workers read one after the other, if the data may end."""
        return self._prepared.spec.data.splits

    def values_were_set(self, global_step: SupportsInt | None) -> None:
        """Continues at another step, if values were set with a global step among them: those before no longer count."""
        if global_step is not None:
            self._ahead = self._last_end = None
            self._sizer.begin_at(int(global_step))


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


class ServersStrategy(StoreStrategy):
    """A strategy whose parameters live on parameter servers and whose steps run on workers.

    Args:
        shape: the servers and workers of the cluster.
        make_cluster: folder for logs -> a cluster, not started.
        options: placement of variables, and how values travel.
        step_timeout: seconds without a result after which an unresponsive task is replaced, or the run fails.
        max_worker_restarts: of each lost worker.
    """

    has_workers: ClassVar[bool] = True

    def __init__(
        self,
        shape: ClusterShape,
        make_cluster: Callable[[Path], Cluster],
        *,
        options: ServerOptions,
        step_timeout: float,
        max_worker_restarts: int,
    ) -> None:
        self._shape = shape
        self.num_replicas = shape.num_workers
        self._replicas_per_step = 1
        self._placement = options
        self._step_timeout = step_timeout
        self._max_worker_restarts = max_worker_restarts
        self._wire = Wire(tf.as_dtype(options.wire_dtype) if options.wire_dtype else None)
        self._make_cluster = make_cluster
        self._cluster: Cluster | None = None
        self._supervisor: Supervisor | None = None
        self._coordinator: Coordinator | None = None
        #: The functions of each evaluation, and its data on workers, by worker and part.
        self._evaluations: dict[Any, tuple[Any, dict[tuple[int, int], Any]]] = {}
        self._iterators = WorkerIterators(self._dataset)
        self._is_training = False
        #: Functions that use the servers while training continues.
        self._aside: list[Future[Any]] = []
        #: The losses of each worker in a call, in a row since it last returned a result.
        self._losses: Counter[int] = Counter()

    def start(self, spec: TrainingSpec) -> None:
        # The chief builds the model while the tasks start, unless its own step may be refused.
        prepared = self._prepare(spec) if overrides_of(spec.model, "train_step") else None
        cluster = self._launch(spec.log_dir) if self._coordinator is None else None
        self._prepared = prepared or self._prepare(spec)
        self.plan = self._prepared.plan(self._shape.num_ps, self._placement, self._shape.num_workers)
        if cluster is not None:
            with self._prepared.replica_step.send_to_joining_tasks():
                self._connect(cluster, spec.grace_secs)
        devices = [task.device for task in self._shape.tasks if task.job == "ps"]
        with self._explaining():
            watch = partial(self._watched, kind="fill")
            self._hold([self._prepared.store(devices, self.plan, self._wire, watch)])
        self._is_training = True
        self._make_dataset = self._prepared.trace_dataset()

    def _prepare(self, spec: TrainingSpec) -> PreparedTraining:
        """Builds the model; refuses, with a `ConfigError`, what cannot be trained like this."""
        prepared = prepare(spec, self._shape.num_workers, self._replicas_per_step)
        for group in prepared.replica_step.updates.groups:
            check_slots_only(group, prepared.replica_step.trainable)
        return prepared

    def start_tasks(self, log_dir: Path, grace_secs: float) -> None:
        """Starts the tasks without training, for `on_workers` alone, or before `start`."""
        self._connect(self._launch(log_dir), grace_secs)

    def why_unreadable(self, data: TrainingData, batch_size: int | None) -> str | None:
        """Why the tasks, which were started, cannot read the data; None if a worker has read its first batch.

        That a task has all that a graph needs shows when it runs it, and not before.
        """
        coordinator = self._running()
        with self._explaining():
            coordinator.before_tracing()
            coordinator.submit(first_batch_reader(data, self._shape.num_workers, batch_size))
            error = coordinator.next_finished().outcome.exception()
        if data.splits is not None:
            data.splits.restore(None)
        if error is None or isinstance(error, tf.errors.OutOfRangeError):
            return None
        if not isinstance(error, tf.errors.OpError):
            raise error
        return reason(error).splitlines()[0].partition(". ")[0]

    def _launch(self, log_dir: Path) -> Cluster:
        self._cluster = self._make_cluster(log_dir)
        self._cluster.launch()
        return self._cluster

    def _connect(self, cluster: Cluster, grace_secs: float) -> None:
        cluster.wait()
        self._supervisor = Supervisor(cluster, self._max_worker_restarts)
        with self._explaining():
            self._coordinator = Coordinator(
                self._supervisor,
                timeout=self._step_timeout,
                grace_secs=grace_secs / 2,
                on_return=self._has_returned,
                on_loss=self._is_lost,
            )

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        with self._until_cancelled():
            self._running().interrupted = interrupted
            self._running().check_tasks()
            return super().run(num_steps, interrupted, may_begin)
        return None

    def drain(self) -> int:
        with self._until_cancelled():
            self._wait_for_sweep()
            super().drain()
        return self._num_ahead

    def at_rest(
        self, function: Callable[[], T], kind: Hashable = None, *, traces: bool = False, of_files: bool = False
    ) -> T:
        self.drain()
        with self._explaining(of_files=of_files):
            if traces:
                self._running().before_tracing()
            return self._running().watch(function, kind)

    def start_aside(self, function: Callable[[], T], kind: Hashable) -> Future[T]:
        started = self._running().start(function, kind)
        self._aside = [*(other for other in self._aside if not other.done()), started]
        return started

    def wait_for(self, outcome: Future[T]) -> T:
        with self._explaining(of_files=True):
            return self._outcome(outcome)

    def _outcome(self, started: Future[T]) -> T:
        return self._running().wait_for(started)

    def stop(self) -> None:
        if self._cluster is None:
            return
        is_dead = True
        is_busy = self._in_call or not all(started.done() for started in self._aside)
        if self._coordinator is not None and (is_busy or not self._coordinator.all_answer()):
            # To forget what is on a task TensorFlow waits for its answer, without a bound; a task that is gone gives
            # an error at once.
            is_dead = self._cluster.kill()
        if not is_dead:
            _abandoned.append((self, self._coordinator))
        elif self._coordinator is not None:
            self._let_go()
            self._coordinator.stop()
        self._coordinator = None
        self._cluster.stop(will_resume=self.is_interrupted)
        self._cluster = None

    @property
    def worker_losses(self) -> int:
        return 0 if self._coordinator is None else self._coordinator.num_lost

    @property
    def worker_restarts(self) -> int:
        return 0 if self._supervisor is None else self._supervisor.restarts

    @property
    def addresses(self) -> Mapping[Task, str]:
        return {} if self._cluster is None else {t: self._cluster.spec.address(t) for t in self._shape.tasks}

    @property
    def pids(self) -> Mapping[Task, int]:
        return {} if self._cluster is None else self._cluster.pids

    def on_workers(self, evaluation: Any) -> list[Any] | None:
        self.drain()
        with self._until_cancelled():
            self._set_calls_aside()
            return self._results(evaluation)
        return None

    def _results(self, evaluation: Any) -> list[Any]:
        coordinator = self._running()
        if evaluation not in self._evaluations:
            coordinator.before_tracing()
            training = self._prepared.present_values(self._store) if self._is_training else None
            self._evaluations[evaluation] = evaluation.trace(training), {}
        functions, placed = self._evaluations[evaluation]

        def call(part: int, worker: int) -> Any:
            if (worker, part) not in placed:
                placed[worker, part] = evaluation.place(functions, part)
            return evaluation.run(functions, placed[worker, part])

        # A part stays with the worker that holds its data, unless that worker is lost.
        workers = coordinator.calls.available
        for part in range(evaluation.num_parts):
            if workers:
                coordinator.start_on(workers[part % len(workers)], partial(call, part), tag=part)
            else:
                coordinator.submit(partial(call, part), tag=part)
        outcomes: dict[int, Future[Any]] = {}
        while len(outcomes) < evaluation.num_parts:
            finished = coordinator.next_finished()
            if finished.is_lost:
                coordinator.submit(partial(call, finished.tag), tag=finished.tag)
            else:
                outcomes[finished.tag] = finished.outcome
        return [outcomes[part].result() for part in range(evaluation.num_parts)]

    def _has_returned(self, worker: int) -> None:
        """Drops the handles to objects on a worker that is a new process now, whose data starts over."""
        self._iterators.forget(worker)
        for _, placed in self._evaluations.values():
            for key in [key for key in placed if key[0] == worker]:
                del placed[key]

    def _is_lost(self, worker: int) -> None:
        """Another worker continues with what a lost one was reading, unless that kills one after the other.

        Raises:
            TaskError: a batch, or the data of a worker, has killed three in a row.
        """
        if not self._is_training:
            return
        splits, in_a_row, place = self._splits, 0, "its data"
        if self._in_call:
            self._losses[worker] += 1
            in_a_row = self._losses[worker]
        if splits is not None and (split := splits.split_of(worker)) is not None:
            in_a_row, place = splits.count_loss(split), split.place
            # One loss says nothing about what was read.
            may_skip = in_a_row >= max(_NAMED_AFTER, self._max_worker_restarts)
            if may_skip and splits.skip(worker, f"{in_a_row} workers in a row were lost while they read it"):
                in_a_row = 0
            else:
                splits.give_back(worker)
        self._has_more_to_read()
        if in_a_row >= _NAMED_AFTER:
            self._name_repeated_loss(worker, in_a_row, place)

    def _name_repeated_loss(self, worker: int, in_a_row: int, place: str) -> None:
        task, splits = Task("worker", worker), self._splits
        how = self._supervisor.how_lost(task) if self._supervisor is not None else "is lost"
        where = f"{place}, in the call after step {self._num_applied}"
        # Whoever kills workers from outside does not care what they read, unless they die at one batch.
        is_of_data = splits is not None or ended_by_itself(how)
        if in_a_row >= _ENDS_AFTER and is_of_data and not (splits is not None and splits.arrive):
            raise TaskError(str(task), RuntimeError(f"{how}; {in_a_row} losses in a row at this place"), where)
        log = log_path(self._prepared.spec.log_dir, task)
        tail = log_tail(log) if self.pids else ""
        warn(f"{task} {how}; {in_a_row} losses in a row at the same place: {where}{tail}")

    def _has_more_to_read(self) -> None:
        """Ends the idleness of workers for which there was nothing to read."""

    @property
    def _num_applied(self) -> int:
        """The global step, as far as this process knows it without asking."""
        return self._prepared.spec.first_step

    def _set_calls_aside(self) -> None:
        """Waits for calls in flight whose results are no longer needed."""

    def _cancel_calls(self) -> None:
        """Treats the calls in flight as lost."""
        warn("calls in flight did not end in time (run.grace_secs); discarding them")

    def _let_go(self) -> None:
        """Deletes the handles to objects on the tasks, while the tasks are there; a failed start has made only some."""
        self._evaluations.clear()
        self._iterators.clear()
        self._sweeper = None
        with suppress(AttributeError):
            del self._prepared, self.values, self._store, self._make_dataset

    @property
    def _in_call(self) -> bool:
        """True if a discarded call may still be running on the tasks."""
        return self._num_in_flight > 0

    def _traced(self, calls: Calls, size: int) -> Callable[..., Any]:
        """The call of so many steps, or of so many gradients."""
        if not calls.traced(size):
            self._before_tracing()
        return calls.function(size)

    def _before_tracing(self) -> None:
        self.warming_up = True
        self._running().before_tracing()

    def _running(self) -> Coordinator:
        if self._coordinator is None:
            raise RuntimeError("used before start() or after stop()")
        return self._coordinator

    def _watched(self, function: Callable[[], T], kind: Hashable = None) -> T:
        """Runs a function that calls the servers; `kind` as in `Coordinator.watch`."""
        with self._explaining():
            return self._running().watch(function, kind)

    @contextmanager
    def _until_cancelled(self) -> Iterator[None]:
        """As `_explaining`; ends when calls in flight took too long after an interruption, and discards them."""
        with self._explaining():
            try:
                yield
            except CallsCancelled:
                self._cancel_calls()

    @contextmanager
    def _explaining(self, *, of_files: bool = False) -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            if of_files and not may_be_lost(error):
                raise
            raise self._explained(error) from error

    def _explained(self, error: tf.errors.OpError) -> ClusterError | TaskError:
        """The meaning of an error of TensorFlow's runtime: a lost task, or the user's own error on a worker."""
        if isinstance(error, OUT_OF_REACH) and self._cluster is not None and self._supervisor is not None:
            if lost := self._supervisor.lost_soon():
                return ClusterError(describe_lost(lost))
            if who := [str(t) for t in self._shape.tasks if self._cluster.spec.address(t) in error.message]:
                return ClusterError(f"{', '.join(who)} is out of reach: {error.message.splitlines()[0]}")
        if isinstance(error, tf.errors.OutOfRangeError):
            return TaskError("a worker", no_batch())
        worker = _WORKER_IN_MESSAGE.search(error.message)
        return TaskError(f"worker:{worker[1]}" if worker else "a worker", in_terms_of_tables(error, self.plan))
