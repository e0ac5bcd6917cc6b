"""`ServersStrategy`: a strategy with parameter servers and workers, and the meaning of a task's error."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import tensorflow as tf

from kdist.cluster.local import log_path
from kdist.cluster.processes.child import ended_by_itself, log_tail
from kdist.cluster.spec import Cluster, ClusterShape, Task
from kdist.config.scheduler import secs_for_calls
from kdist.config.schema import ServerOptions
from kdist.data.base import TrainingData, first_batch_reader
from kdist.data.shares import SharedData
from kdist.dispatch.coordinator import OUT_OF_REACH, CallsCancelled, Coordinator, may_be_lost
from kdist.dispatch.health import Supervisor, describe_lost
from kdist.errors import ClusterError, KdistError, ResizeError, TaskError, reason
from kdist.log import warn
from kdist.model.source import overrides_of
from kdist.parameters.optimizer import check_slots_only
from kdist.parameters.placement.messages import Wire
from kdist.strategies.base import PendingResize, TrainingSpec
from kdist.strategies.call_logs import StepLogs
from kdist.strategies.calls import Calls, WorkerIterators
from kdist.strategies.on_store import StoreStrategy
from kdist.strategies.prepared_training import PreparedTraining, in_terms_of_tables, no_batch, prepare

T = TypeVar("T")

#: Losses of workers in a row at the same place, after which it is named, and after which training ends.
_NAMED_AFTER, _ENDS_AFTER = 2, 3

#: Strategies, with their coordinators, whose tasks do not respond, and which this process may not kill: to delete a
#: handle to an object on a task, TensorFlow waits for the task.
_abandoned: list[Any] = []

_WORKER_IN_MESSAGE = re.compile(r"/job:worker/replica:0/task:(\d+)")


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
        self._replicas_per_step = 1
        self._take_shape(shape, range(shape.num_workers))
        self._placement = options
        self._step_timeout = step_timeout
        self._max_worker_restarts = max_worker_restarts
        self._wire = Wire(tf.as_dtype(options.wire_dtype) if options.wire_dtype else None)
        self._make_cluster = make_cluster
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
        """The reason why the tasks cannot read the data; None if a worker, which was started, has read its first batch.

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
                grace_secs=secs_for_calls(grace_secs),
                on_return=self._has_returned,
                on_loss=self._is_lost,
            )

    def check_tasks(self) -> None:
        self._running().check_tasks()

    @property
    def num_workers(self) -> int:
        return self._shape.num_workers

    def finish_resize(self, resize: PendingResize, spec: TrainingSpec) -> TrainingSpec:
        cluster, coordinator = self._cluster, self._running()
        assert cluster is not None
        # No step takes as long as a change of the cluster.
        self._last_end = None
        spec = self._with_shares(spec)
        if self._stands_still_for(resize, spec):
            # Before workers join, which would take calls that are not for them.
            self._set_calls_aside()
            self.drain()
        before = self._workers
        cluster.admit(resize.joining)
        workers = [task.index for task in cluster.spec.of_job("worker") if task not in resize.leaving]
        try:
            if resize.joining:
                coordinator.connect_joined(resize.joining)
            self._take_shape(resize.after, workers)
            if resize.after.num_workers:
                self._adapt(resize, spec)
        except (KdistError, tf.errors.OpError) as error:
            self._undo(resize, before, error)
        for task in resize.leaving:
            if task.job == "worker":
                if self._splits is not None:
                    self._splits.give_back(task.index)
                self._has_returned(task.index)
        if resize.leaving:
            with self._explaining():
                coordinator.disconnect(resize.leaving)
            cluster.dismiss(resize.leaving)
        return spec

    def _undo(self, resize: PendingResize, workers: Sequence[int], error: Exception) -> NoReturn:
        """Continues on the cluster as it was before, unless one of its tasks is lost: they have all values still.

        Raises:
            ResizeError: it continues.
            ClusterError: it cannot.
        """
        cluster, coordinator = self._cluster, self._running()
        assert cluster is not None
        assert self._supervisor is not None
        lost = self._supervisor.lost_soon()
        if lost.keys() - {*resize.joining}:
            raise self._explained(error) if isinstance(error, tf.errors.OpError) else error
        cause = error.cause if isinstance(error, TaskError) else error
        why = f"{describe_lost(lost)} while it joined" if lost else reason(cause)
        # Frames that raised it have handles to objects on the tasks that go.
        traceback.clear_frames(error.__traceback__)
        self._take_shape(resize.before, workers)
        with self._explaining():
            coordinator.disconnect(resize.joining)
        cluster.dismiss(resize.joining)
        raise ResizeError(why) from error

    def _take_shape(self, shape: ClusterShape, workers: Sequence[int]) -> None:
        """Counts on so many tasks from now on, and on these workers."""
        self._shape, self._workers = shape, list(workers)
        self.num_replicas = shape.num_workers

    def _number_of(self, worker: int) -> int:
        # Others may have left.
        return self._workers.index(worker)

    def _adapt(self, resize: PendingResize, spec: TrainingSpec) -> None:
        """Makes what depends on the tasks, which are connected by now, for a training with this spec."""
        prepared = self._prepare_again(spec)
        assert self._cluster is not None
        servers = [task for task in self._cluster.spec.of_job("ps") if task not in resize.leaving]
        plan = prepared.plan(len(servers), self._placement, resize.after.num_workers)
        plan = replace(plan, tasks=tuple(task.index for task in servers))
        with self._explaining():
            self._before_tracing()
            watch = partial(self._watched, kind="take_over")
            devices = [task.device for task in servers]
            store = prepared.store(devices, plan, self._wire, watch, values_of=self._store)
            make_dataset = prepared.trace_dataset()
            # A server on which nothing is placed was asked for nothing; it may be lost all the same.
            self._running().examine()
        # Nothing has changed before that.
        self._prepared, self.plan, self._make_dataset = prepared, plan, make_dataset
        self._evaluations.clear()
        self._iterators.clear()
        self._hold([store])
        self._begin_with_store()

    def _stands_still_for(self, resize: PendingResize, spec: TrainingSpec) -> bool:
        """True if no step may be in flight while the cluster changes, for a training with this spec."""
        return True

    def _prepare_again(self, spec: TrainingSpec) -> PreparedTraining:
        """The training, prepared for the present number of workers."""
        return replace(self._prepared, spec=spec, num_workers=self._shape.num_workers)

    def _begin_with_store(self) -> None:
        """Makes what uses the store, and is made anew when another one has the values."""

    def _with_shares(self, spec: TrainingSpec) -> TrainingSpec:
        shared = super()._with_shares(spec)
        if isinstance(shared.data, SharedData) and shared is not spec:
            shared.data.splits.last_step = spec.last_step
            shared.data.splits.begin_to_count(self._num_applied)
        return shared

    def _batches_read(self, number: int, batches_at: Callable[[int], int]) -> Sequence[int]:
        # What workers have read is known when they have finished their calls.
        self._set_calls_aside()
        self.drain()
        known = {worker: first + self._iterators.num_read[worker] for worker, first in self._first_batches.items()}
        return [known.get(share, batches_at(self._num_applied)) for share in range(number)]

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        with self._until_cancelled():
            self._running().interrupted = interrupted
            self.check_tasks()
            return super().run(num_steps, interrupted, may_begin)
        return None

    def drain(self) -> None:
        with self._until_cancelled():
            self._wait_for_sweep()
            super().drain()

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
        self._prepared.spec.data.forget(worker)
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
        if splits is not None:
            if (split := splits.split_of(worker)) is not None:
                in_a_row, place = splits.count_loss(split), split.place
                # One loss says nothing about what was read.
                may_skip = in_a_row >= max(_NAMED_AFTER, self._max_worker_restarts)
                if may_skip and splits.skip(worker, f"{in_a_row} workers in a row were lost while they read it"):
                    in_a_row = 0
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
        if "_prepared" in vars(self):
            self._prepared.spec.data.forget()
        self._sweeper = None
        with suppress(AttributeError):
            del self._prepared, self.values, self._store, self._make_dataset

    @property
    def _in_call(self) -> bool:
        """True if a discarded call may still be running on the tasks."""
        return self._num_in_flight > 0

    def _traced(self, calls: Calls, size: int) -> tf.types.experimental.ConcreteFunction:
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
            if who := [str(t) for t in self._cluster.spec.tasks if self._cluster.spec.address(t) in error.message]:
                return ClusterError(f"{', '.join(who)} is out of reach: {error.message.splitlines()[0]}")
        if isinstance(error, tf.errors.OutOfRangeError):
            return TaskError("a worker", no_batch())
        worker = _WORKER_IN_MESSAGE.search(error.message)
        return TaskError(f"worker:{worker[1]}" if worker else "a worker", in_terms_of_tables(error, self.plan))
