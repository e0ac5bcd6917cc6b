"""`sync_replicas`: synchronous training on parameter servers that need not wait for the slowest workers.

After Chen et al., "Revisiting Distributed Synchronous SGD" (2016, arXiv:1604.00981), and TF1's `SyncReplicasOptimizer`:
an update is the mean of `replicas_to_aggregate` gradients, all computed from the present parameters. The gradients of
workers beyond that number (backup workers) arrive too late and are dropped.

If every worker contributes its share to every step, a call runs on all tasks (`kdist.strategies.in_graph`).
If it matters which worker is first, or a worker is missing, the chief does all the waiting, so that a worker that is
lost or has no more data blocks no other. Gradients stay in no queue and no accumulator: after a loss, only the calls
have to be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, SupportsInt

import numpy as np
import tensorflow as tf

from kdist._compat.first_call_lock import fetch
from kdist._compat.tensorflow import function_for_tasks
from kdist.cluster.spec import ClusterShape, Task
from kdist.config.schema import SyncReplicasOptions
from kdist.data.base import iterator_spec, next_of
from kdist.data.splits import NothingToRead, Splits
from kdist.dispatch.coordinator import Finished, may_be_lost
from kdist.errors import ClusterError, ConfigError, TaskError, TornUpdateError
from kdist.log import warn
from kdist.parameters.aggregation import Contribution, GradientAggregator
from kdist.strategies.base import PendingResize, TrainingSpec
from kdist.strategies.call_logs import CallLogs, StepLogs
from kdist.strategies.gradient_counts import GradientCounts, add_counts
from kdist.strategies.in_graph import InGraphSyncCalls
from kdist.strategies.on_servers import ServersStrategy
from kdist.strategies.prepared_training import PreparedTraining, no_batch
from kdist.strategies.registry import check_quorum

_TRIES = 3


@dataclass(frozen=True)
class Quorum:
    """The number of gradients that make an update, and the workers that may compute them.

    Attributes:
        replicas_to_aggregate: gradients of an update.
        num_workers: number of workers.
        shared_tokens: TF1's tokens: each step has as many as there are workers, or gradients if those are more, and a
            fast worker takes several. Otherwise every worker has its share.
    """

    replicas_to_aggregate: int
    num_workers: int
    shared_tokens: bool = False

    def share(self, worker: int) -> int:
        """The number of gradients of one step that a worker may compute, if it has a share."""
        if self.replicas_to_aggregate <= self.num_workers:
            return 1
        return (self.replicas_to_aggregate + self.num_workers - 1 - worker) // self.num_workers

    @property
    def needs_everyone(self) -> bool:
        """True if each step takes every gradient that the workers may compute, so that their order does not matter."""
        return not self.shared_tokens and self.replicas_to_aggregate >= self.num_workers

    @property
    def tokens(self) -> int:
        """The number of gradients of one step that all workers together may compute."""
        return max(self.replicas_to_aggregate, self.num_workers)


#: The result of a call of a worker: tensors on the servers, and its packed logs.
Gradient = tuple[Contribution, np.ndarray]


class SyncReplicas(ServersStrategy):
    """Synchronous parameter servers with backup workers. Args: as of `ServersStrategy`."""

    name: ClassVar[str] = "sync_replicas"

    def __init__(self, *args: Any, options: SyncReplicasOptions, **kwargs: Any) -> None:
        self._options = options
        super().__init__(*args, options=options, **kwargs)
        self._on_lost_worker = options.on_lost_worker
        self._worker_timeout = options.worker_timeout
        #: Workers with a call in flight, and the step at which it was started.
        self._busy: dict[int, int] = {}
        #: Gradients since the last update that no update waited for.
        self._late: dict[int, GradientCounts] = {}
        #: Workers that have no more data.
        self._finished: set[int] = set()
        #: Lost workers that updates no longer wait for.
        self._done_without: set[int] = set()
        #: A call of one gradient, and applications of the mean of so many; traced when they are first needed.
        self._gradient: tf.types.experimental.ConcreteFunction | None = None
        self._applies: dict[int, tf.types.experimental.ConcreteFunction] = {}
        #: The calls on all tasks, traced when no worker is missing.
        self._lockstep: InGraphSyncCalls | None = None
        self._in_lockstep = False
        #: True if a step applies gradients more than once.
        self._has_phases = False
        #: The losses of workers when the last of these calls started.
        self._num_lost_before = 0
        #: Calls on all tasks that failed in a row although no task was lost.
        self._failures = 0
        #: The global step; None until it has been read from the servers.
        self._step: int | None = None

    def start(self, spec: TrainingSpec) -> None:
        super().start(spec)
        # All workers take all steps.
        self._sizer = self._prepared.sizer(num_workers=1)
        self._begin_with_store()

    def _begin_with_store(self) -> None:
        self._logs = CallLogs(self._prepared.replica_step)
        self._aggregator = GradientAggregator(self._store)
        self._lockstep = self._gradient = None
        self._applies.clear()

    def finish_resize(self, resize: PendingResize, spec: TrainingSpec) -> TrainingSpec:
        spec = super().finish_resize(resize, spec)
        self._sizer.resize(num_workers=1)
        return spec

    def _check_shape(self, shape: ClusterShape) -> None:
        check_quorum(self._options, shape)

    def _take_shape(self, shape: ClusterShape, workers: Sequence[int]) -> None:
        super()._take_shape(shape, workers)
        options, num_workers = self._options, shape.num_workers
        if not num_workers:
            # Until another one joins there is no update.
            return
        self._quorum = Quorum(
            # Workers may have left beyond those.
            options.replicas_to_aggregate or max(1, num_workers - options.backup_workers),
            num_workers,
            options.token_mode == "tf1",
        )
        self.batches_per_step = self._replicas_per_step = self._quorum.replicas_to_aggregate

    @property
    def _can_share(self) -> bool:
        # At the end of an epoch some would have no batch for a step in which all take part.
        return not self._has_phases

    def _share(self, worker: int) -> int:
        """The number of gradients of one step that a worker computes."""
        return self._quorum.share(self._number_of(worker))

    def _prepare_again(self, spec: TrainingSpec) -> PreparedTraining:
        return self._prepare(spec)

    def _prepare(self, spec: TrainingSpec) -> PreparedTraining:
        prepared = super()._prepare(spec)
        num_workers = self._shape.num_workers
        if num_workers > 1:
            prepared.check_assigned(self.name)
        self._has_phases = prepared.replica_step.updates.num_phases > 1
        if self._has_phases and prepared.spec.data.splits is not None:
            raise ConfigError(
                f"strategy=sync_replicas: model {prepared.spec.model.name} updates weights several times in a step, "
                "for which all workers need a batch; with data that keeps arriving, that one process reads, or of "
                "unknown length, use strategy=parameter_server"
            )
        if self._has_phases and {self._quorum.share(worker) for worker in range(num_workers)} != {1}:
            raise ConfigError(
                f"strategy=sync_replicas: all workers take part in a step of model {prepared.spec.model.name}, which "
                f"updates weights several times; set strategy.replicas_to_aggregate={num_workers}, backup_workers=0"
            )
        return prepared

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if interrupted():
            return None
        if self._splits is not None:
            if self._splits.look():
                self._finished.clear()
            if self._splits.are_endless:
                self._assign_splits(self._splits)
            if self._finished and not self._active():
                return None
        self._needed()
        everyone = self._quorum.needs_everyone and len(self._active()) == self._shape.num_workers and not self._busy
        # With splits that may end, a call on all tasks would end for all of them when one has no other split.
        everyone = everyone and (self._splits is None or self._splits.are_endless)
        # Between two phases no worker can be replaced by another one.
        if everyone or self._has_phases:
            began = time.monotonic()
            try:
                if (logs := self._lockstep_call(may_begin)) is not None:
                    return logs
            except tf.errors.CancelledError as error:
                if self._has_phases:
                    raise
                # Sometimes that is all that is left of the error of a worker; by itself, it reports its own.
                self._recover_lockstep(error, began)
            except tf.errors.OpError as error:
                if not may_be_lost(error):
                    raise
                self._recover_lockstep(error, began)
                return self._next_logs(may_begin, interrupted)
            if self._has_phases:
                raise TaskError("a worker", no_batch())
        return self._one_update()

    def _assign_splits(self, splits: Splits) -> None:
        """Gives each idle worker a split before any of them reads, so that as many as possible have one."""
        for worker in self._active():
            try:
                splits.assign(worker)
            except NothingToRead:
                self._finished.add(worker)

    def _lockstep_call(self, remaining: int) -> StepLogs | None:
        """Runs a call on all tasks; None if a worker has no data, so that the others have to continue without it.

        Raises:
            tf.errors.OpError: a task is lost.
        """
        coordinator, workers = self._running(), self._active()
        step = self._present_step()
        if self._lockstep is None:
            self.warming_up = True
            self._sizer.prepare_again()
            self._lockstep = InGraphSyncCalls(
                self._prepared.replica_step,
                self._store,
                self._aggregator,
                self._logs,
                iterator_spec(self._make_dataset),
                {worker: self._share(worker) for worker in workers},
            )
            self._sizer.go_by(self._lockstep.trace_secs, shares_step=self._lockstep.shares_step)
        self._num_lost_before = coordinator.num_lost
        if (splits := self._splits) is not None:
            whole = min((splits.batches_left(w) or 0) // self._share(w) for w in workers)
            if not whole:
                # At the end of an epoch, a worker has less than its share of a step.
                return None
            remaining = min(whole, remaining)
            for worker in workers:
                self._iterators.change_split(worker, splits)
        size = self._sizer.next_size(remaining)
        iterators = self._iterators.of_all(workers, coordinator, splits)
        function = self._traced(self._lockstep, size)
        self._in_lockstep = True
        try:
            packed = coordinator.watch(
                lambda: [logs.numpy() for logs in function(iterators)], function.name, is_call=True
            )
        except tf.errors.OutOfRangeError:
            # The call cancelled the reads of the workers that have data, which ends their iterators.
            self._iterators.clear()
            self._in_lockstep = False
            if self.values.global_step() != step:
                raise
            return None
        self._in_lockstep = False
        for worker in workers:
            self._iterators.has_read(worker, splits, size * self._share(worker))
        self._failures = 0
        self._losses.clear()
        self._step = step + size
        logs = self._logs.join([self._logs.unpack(row) for row in packed])
        shares = {worker: GradientCounts(accepted=self._share(worker)) for worker in workers}
        return replace(logs, gradient_counts=(shares,) * size)

    def _recover_lockstep(self, error: tf.errors.OpError, began: float) -> None:
        """Finds out which task is lost after a call on all tasks failed, and how much of the call was applied.

        Args:
            error: of the call.
            began: when the call did, by `time.monotonic`.

        Raises:
            TornUpdateError: an update was started and not finished, or not by all servers.
            ClusterError: a server is lost.
            tf.errors.OpError: no task is lost, and such calls fail repeatedly.
        """
        # TensorFlow caches, for each such function, what it found on each task.
        self._lockstep = None
        self._iterators.clear()
        coordinator = self._running()
        # A worker whose host does not respond is soon lost, or continues: then all of them try again.
        coordinator.wait_for_silent()
        coordinator.examine()
        self._in_lockstep = False
        if coordinator.num_lost == self._num_lost_before:
            self._failures += 1
            if self._failures > _TRIES:
                raise error
        self._step = None
        if not self._watched(self._store.counters.is_consistent):
            raise TornUpdateError(f"{self._names(self._lost())} was lost in the middle of an update")
        self._waited_secs += time.monotonic() - began

    def _one_update(self) -> StepLogs | None:
        """Collects the gradients of one step and applies their mean; None if no worker has anything to read."""
        step = self._present_step()
        compute = self._traced_gradient()
        accepted: list[tuple[int, Gradient]] = []
        given = dict.fromkeys(self._workers, 0)
        counts, self._late = self._late, {}
        while len(accepted) < self._needed():
            self._hand_out(step, given, compute)
            finished = self._running().next_finished()
            worker, begun_at = finished.worker, self._busy.pop(finished.worker)
            gradient = self._gradient_of(finished)
            if gradient is None:
                # It may be called again when it returns.
                given[worker] -= begun_at == step
            elif begun_at < step:
                add_counts(counts, {worker: GradientCounts(dropped=1, stale=1)})
            else:
                add_counts(counts, {worker: GradientCounts(accepted=1)})
                accepted.append((worker, gradient))
            del finished, gradient
        if not accepted:
            self._late = counts
            return None
        # Backup workers continue in the meantime.
        self._hand_out(step, given, compute)
        # In the order of workers, so that sums do not depend on which was first.
        accepted.sort(key=lambda pair: pair[0])
        self._step = self._apply([contribution for _, (contribution, _) in accepted])
        logs = [self._logs.unpack(packed) for _, (_, packed) in accepted]
        staleness = step - min(int(log.staleness[0]) for log in logs)
        return replace(self._logs.join(logs), staleness=np.array([staleness]), gradient_counts=(counts,))

    def _hand_out(self, step: int, given: dict[int, int], compute: tf.types.experimental.ConcreteFunction) -> None:
        """Starts a call on every idle worker that may still compute a gradient of this step."""
        for worker in self._active():
            if worker in self._busy:
                continue
            if self._quorum.shared_tokens:
                may = sum(given.values()) < self._quorum.tokens
            else:
                # No other worker takes the share of an absent one: the quorum is lowered by it.
                may = given[worker] < self._share(worker)
            if may:
                given[worker] += 1
                self._busy[worker] = step
                self._running().start_on(worker, partial(self._call, compute))

    def _active(self) -> list[int]:
        """Workers that are connected and have data."""
        return [worker for worker in self._running().calls.available if worker not in self._finished]

    def _lost(self) -> set[int]:
        return set(self._workers) - set(self._running().calls.available)

    def _needed(self) -> int:
        """The number of gradients of an update: as requested, or as the connected workers with data can compute.

        Raises:
            ClusterError: too few workers are left, and waiting for them did not help.
        """
        if self._reachable() < self._quorum.replicas_to_aggregate and self._lost() - self._done_without:
            self._wait_for_lost()
        if not self._active() and (self._splits is None or not self._finished):
            raise ClusterError("no worker is left that has data")
        return min(self._quorum.replicas_to_aggregate, self._reachable())

    def _reachable(self) -> int:
        """The number of gradients of one step that the connected workers with data can compute."""
        active = self._active()
        if self._quorum.shared_tokens and active:
            return self._quorum.tokens
        return sum(self._share(worker) for worker in active)

    def _wait_for_lost(self) -> None:
        """Waits until enough of the lost workers have returned.

        Raises:
            ClusterError: they did not return, and `on_lost_worker=fail`.
        """
        needed, began = self._quorum.replicas_to_aggregate, time.monotonic()
        while self._reachable() < needed and (left := began + self._worker_timeout - time.monotonic()) > 0:
            self._running().wait_a_moment(left)
        self._waited_secs += time.monotonic() - began
        if self._reachable() >= needed:
            return
        names = self._names(self._lost() - self._done_without)
        late = f"{names} did not come back within {self._worker_timeout:g} s (strategy.worker_timeout)"
        if self._on_lost_worker == "fail":
            raise ClusterError(f"{late}; {needed} gradients make an update (strategy.on_lost_worker=fail)")
        self._done_without = self._lost()
        warn(f"{late}; {self._reachable()} gradients make an update until then")

    @staticmethod
    def _names(workers: set[int]) -> str:
        return ", ".join(str(Task("worker", worker)) for worker in sorted(workers)) or "a worker"

    def _gradient_of(self, finished: Finished) -> Gradient | None:
        """The result of a call; None if its worker is lost or has no more data."""
        if finished.is_lost:
            return None
        try:
            gradient: Gradient = finished.outcome.result()
            self._losses.pop(finished.worker, None)
            return gradient
        except NothingToRead:
            self._finished.add(finished.worker)
            return None
        except tf.errors.OutOfRangeError:
            self._finished.add(finished.worker)
            if not self._active():
                raise
            warn(
                f"{Task('worker', finished.worker)} has no more data; {self._needed()} gradients make an update "
                "from now on"
            )
            return None

    def _cancel_calls(self) -> None:
        super()._cancel_calls()
        self._busy.clear()
        self._in_lockstep = False
        if not self._watched(self._store.counters.is_consistent):
            raise ClusterError("training was interrupted in the middle of an update")

    def _set_calls_aside(self) -> None:
        while self._busy:
            finished = self._running().next_finished()
            del self._busy[finished.worker]
            if self._gradient_of(finished) is not None:
                add_counts(self._late, {finished.worker: GradientCounts(dropped=1, stale=1)})

    def _has_more_to_read(self) -> None:
        if self._splits is not None:
            self._finished.clear()

    @property
    def _num_applied(self) -> int:
        return self._step or 0

    def _has_returned(self, worker: int) -> None:
        super()._has_returned(worker)
        self._finished.discard(worker)
        self._done_without.discard(worker)
        self._lockstep = None

    def _call(self, compute: tf.types.experimental.ConcreteFunction, worker: int) -> Gradient:
        def call(iterator: Any) -> Gradient:
            *contribution, packed = compute(iterator)
            return contribution, fetch(packed)

        return self._iterators.read(worker, self._splits, call)

    def _traced_gradient(self) -> tf.types.experimental.ConcreteFunction:
        if self._gradient is None:
            replica_step = self._prepared.replica_step

            def one_gradient(iterator: Any) -> list[tf.Tensor]:
                pulled = self._store.pull()
                metrics = self._logs.initial_metrics()
                batch, seeds = next_of(iterator)
                output = next(self._store.run_step(replica_step, pulled, batch, seeds, metrics))
                contribution = self._aggregator.send(output, pulled)
                # In place of the staleness it returns the step of its parameters; the chief knows how stale that is.
                logs = self._logs.pack(pulled.global_step[None], [[output.num_examples, *output.metrics]])
                return [*contribution, logs]

            self._before_tracing()
            self._gradient = function_for_tasks(one_gradient, iterator_spec(self._make_dataset))
        return self._gradient

    def _apply(self, contributions: list[Contribution]) -> int:
        """Applies the mean; returns the new global step."""
        size = len(contributions)
        if size not in self._applies:
            self._before_tracing()
            specs = [tf.TensorSpec(s.shape, s.dtype) for s in self._traced_gradient().structured_outputs[:-1]]

            def apply_mean(several: list[Contribution]) -> tf.Tensor:
                return self._aggregator.apply_mean(several)

            self._applies[size] = tf.function(apply_mean, autograph=False).get_concrete_function([specs] * size)
        apply = self._applies[size]
        return int(self._watched(lambda: apply(contributions).numpy(), apply.name))

    def _begins_at(self, worker: int) -> int:
        return self._step or 0

    def _present_step(self) -> int:
        """The global step. Only this process applies updates, so it is read once."""
        if self._step is None:
            self._step = self.values.global_step()
        return self._step

    def values_were_set(self, global_step: SupportsInt | None) -> None:
        super().values_were_set(global_step)
        if global_step is not None:
            self._step = None

    @property
    def _in_call(self) -> bool:
        return bool(self._busy) or self._in_lockstep

    def _let_go(self) -> None:
        self._lockstep = None
        self._gradient = None
        self._applies.clear()
        with suppress(AttributeError):
            del self._aggregator
        super()._let_go()
