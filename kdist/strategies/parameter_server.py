"""`parameter_server`: asynchronous training, each worker at its own pace against shared parameters.

After DistBelief (Dean et al., 2012) and TF1's between-graph replication: a worker pulls the parameters, computes a
gradient on its own batch and pushes it; no worker waits for another.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from kdist._compat.first_call_lock import fetch
from kdist._compat.tensorflow import function_for_tasks
from kdist.cluster.spec import Task
from kdist.config.checks import number_or_auto
from kdist.config.scheduler import secs_for_calls
from kdist.config.schema import ParameterServerOptions
from kdist.data.base import iterator_spec
from kdist.data.splits import NothingToRead
from kdist.dispatch.call_queue import Disabled
from kdist.dispatch.coordinator import Finished
from kdist.errors import ConfigError
from kdist.log import Line, record, warn
from kdist.strategies.base import PendingResize, TrainingSpec
from kdist.strategies.call_logs import StepLogs
from kdist.strategies.calls import UnrolledCalls
from kdist.strategies.gradient_counts import GradientCounts
from kdist.strategies.on_servers import ServersStrategy
from kdist.strategies.on_store import StoreValues
from kdist.strategies.prefetch import PrefetchSearch
from kdist.strategies.prepared_training import PreparedTraining

T = TypeVar("T")
_Function: TypeAlias = tf.types.experimental.ConcreteFunction

# A second call waits at each worker while the first one runs; more would only occupy the chief's memory.
_CALLS_IN_FLIGHT_PER_WORKER = 2
_NUM_EMPTY_CALLS = 3


class ParameterServer(ServersStrategy):
    """Asynchronous parameter servers. Args: as of `ServersStrategy`."""

    name: ClassVar[str] = "parameter_server"
    is_asynchronous: ClassVar[bool] = True

    def __init__(self, *args: Any, options: ParameterServerOptions, **kwargs: Any) -> None:
        super().__init__(*args, options=options, **kwargs)
        self.batches_per_step = options.local_steps
        self._asked = number_or_auto("strategy.prefetch", options.prefetch, at_least=0)
        self._search: PrefetchSearch | None = None
        self._first_step: int | None = None
        #: Workers without calls, because there was no split for them.
        self._idle: set[int] = set()
        #: The losses of workers that the counters of the servers account for.
        self._aligned_after = 0
        #: The calls of each size in flight, and the finished ones since they were last traced; the steps of all that
        #: have finished.
        self._in_flight: Counter[int] = Counter()
        self._num_ended = 0
        self._num_prepared: Counter[int] = Counter()

    def _adapt(self, resize: PendingResize, spec: TrainingSpec) -> None:
        if self._stands_still_for(resize, spec):
            super()._adapt(resize, spec)
            return
        # The other workers train meanwhile.
        self._prepared = replace(self._prepared, spec=spec)
        self.values = StoreValues([self._store], self, spec)

    def _stands_still_for(self, resize: PendingResize, spec: TrainingSpec) -> bool:
        # Without splits, each worker begins with another part of the data.
        return resize.changes_servers or spec.data.splits is None

    def _begin_with_store(self) -> None:
        self._make_calls(self._calls.num_ahead)

    def may_finish(self, resize: PendingResize) -> bool:
        workers = [task.index for task in resize.leaving if task.job == "worker"]
        if not super().may_finish(resize):
            return False
        if workers and not resize.after.num_workers:
            # Nobody else would take the calls that wait.
            self.drain()
        return self._running().have_finished(workers)

    def finish_resize(self, resize: PendingResize, spec: TrainingSpec) -> TrainingSpec:
        spec = super().finish_resize(resize, spec)
        self._sizer.resize(max(1, self._shape.num_workers))
        self._has_more_to_read()
        return spec

    @property
    def _can_share(self) -> bool:
        # Otherwise a worker reads several batches for a step.
        return self.batches_per_step == 1

    def start(self, spec: TrainingSpec) -> None:
        super().start(spec)
        self._sizer = self._prepared.sizer()
        if self._asked is None and self._may_wait_long:
            empty_call_secs = self._empty_call_secs()
            prepare_secs = secs_for_calls(spec.grace_secs)
            self._search = PrefetchSearch(
                spec.steps_per_call, self.num_workers, spec.last_step, prepare_secs, empty_call_secs
            )
            self._search.begin_at(spec.first_step)
            self._sizer = self._search
        self._make_calls(self._asked or 0)

    @property
    def _may_wait_long(self) -> bool:
        """True if workers may wait for the network while they could compute. One worker alone goes on to train as Keras
        does in one process."""
        hosts = {address.rpartition(":")[0] for address in self.addresses.values()}
        return len(hosts) > 1 and self._shape.num_workers > 1 and self._prepared.replica_step.updates.num_phases == 1

    def _make_calls(self, prefetch: int) -> None:
        replica_step, spec = self._prepared.replica_step, iterator_spec(self._make_dataset)
        self._calls = UnrolledCalls(replica_step, self._store, spec, self.batches_per_step, prefetch)
        self._sizer.go_by(self._calls.trace_secs, shares_step=self._calls.shares_step)
        self._num_prepared.clear()

    def _observe(self, num_steps: int, secs: float) -> None:
        super()._observe(num_steps, secs)
        if (search := self._search) is None:
            return
        if search.prefetch != self._calls.num_ahead:
            self.drain()
            self._make_calls(search.prefetch)
        if search.why:
            size = search.steps_per_call
            chosen = f"strategy.prefetch={search.prefetch} train.steps_per_call={size}: {search.why}"
            record(Line(chosen, "prefetch"), logging.INFO)
            self._search = None

    def _empty_call_secs(self) -> float:
        """The seconds of a call in which a worker does nothing: a round trip, and what a call costs on both sides.

        That of the farthest worker: one may be on the host of this process.
        """
        coordinator, secs = self._running(), defaultdict[int, list[float]](list)

        def call(worker: int) -> None:
            begin = time.perf_counter()
            fetch(empty())
            secs[worker].append(time.perf_counter() - begin)

        with self._explaining():
            coordinator.before_tracing()
            empty = function_for_tasks(lambda: tf.constant(0.0))
            # The first one sends the function to the worker. A worker that is lost meanwhile makes none.
            for _ in range(1 + _NUM_EMPTY_CALLS):
                for worker in self._workers:
                    coordinator.start_on(worker, call)
                for _ in self._workers:
                    coordinator.next_finished()
        return max(map(min, secs.values()), default=0.0)

    def _prepare(self, spec: TrainingSpec) -> PreparedTraining:
        prepared = super()._prepare(spec)
        updates = prepared.replica_step.updates
        if self._asked and updates.num_phases > 1:
            raise ConfigError(
                f"strategy.prefetch={self._asked}: a step of model {prepared.spec.model.name} reads what it has "
                "updated; set strategy.prefetch=0"
            )
        if self.batches_per_step > 1 and (len(updates.updates) > 1 or updates.assigned):
            raise ConfigError(
                f"strategy.local_steps={self.batches_per_step}: a step of model {prepared.spec.model.name} updates or "
                "assigns weights several times; set strategy.local_steps=1"
            )
        return prepared

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if self._first_step is None:
            self._first_step = self.values.global_step()
        coordinator = self._running()
        if self._splits is not None:
            if self._splits.look():
                self._has_more_to_read()
            elif self._idle and not coordinator.calls.available:
                return self._in_flight_logs()
        while self._in_flight.total() < self._most_calls and not interrupted():
            may_begin_more = may_begin - self._num_in_flight
            if may_begin_more <= 0:
                break
            size = self._sizer.next_size(may_begin_more)
            coordinator.submit(self._call_of(size), tag=size)
            self._in_flight[size] += 1
        return self._in_flight_logs()

    @property
    def _most_calls(self) -> int:
        return _CALLS_IN_FLIGHT_PER_WORKER * self._shape.num_workers

    @property
    def steps_in_flight(self) -> int:
        return self._most_calls * self._sizer.steps_per_call

    def set_active(self, workers: Collection[int]) -> None:
        self._running().calls.set_active(workers)

    def at_rest(
        self, function: Callable[[], T], kind: Hashable = None, *, traces: bool = False, of_files: bool = False
    ) -> T:
        self.drain()
        if (num_lost := self._running().num_lost) > self._aligned_after:
            self._watched(self._store.align)
            self._aligned_after = num_lost
        return super().at_rest(function, kind, traces=traces, of_files=of_files)

    def _call_of(self, size: int) -> Callable[[int], np.ndarray]:
        """The call of so many steps, with smaller ones for splits that end before, and for what follows an error."""
        self._traced(self._calls, size)
        needs_single = self._splits is not None or self._calls.shares_step
        sizes = [n for n in range(1, size + 1) if self._calls.traced(n) or (needs_single and n == 1)]
        calls = {n: partial(_fetched, self._calls.function(n)) for n in sizes}

        def call(worker: int) -> np.ndarray:
            if self._running().interrupted():
                # The time that a signal leaves is for the calls that had begun.
                raise NothingToRead
            # A call of one step reports its own error.
            allowed = {1: calls[1]} if worker in self._iterators.cancelled and 1 in calls else calls
            return self._iterators.read_steps(worker, self._splits, allowed, size)

        return call

    def _begins_at(self, worker: int) -> int:
        if self._splits is not None:
            # More calls may have ended than this process has noticed; no two batches may have the same seeds.
            return (self._first_step or 0) + self._splits.num_batches(worker)
        if worker in self._iterators.cancelled and worker in self._first_batches:
            # It continues where its call had begun.
            steps = self._first_batches[worker] // self.batches_per_step + self._iterators.num_read[worker]
            return self._prepared.spec.count.begin + steps * self._prepared.num_workers
        # A worker that returns continues to read where training is.
        return self._num_applied

    @property
    def _num_in_flight(self) -> int:
        return sum(size * number for size, number in self._in_flight.items())

    def _in_flight_logs(self) -> StepLogs | None:
        coordinator = self._running()
        while True:
            if not self._in_flight.total():
                return None
            finished = coordinator.next_finished()
            error = finished.outcome.exception()
            if isinstance(error, NothingToRead):
                self._is_idle(finished)
            elif isinstance(error, tf.errors.OutOfRangeError):
                self._has_no_data(finished)
            else:
                break
        size = finished.tag
        if error is None:
            self._losses.pop(finished.worker, None)
        self._in_flight[size] -= 1
        # The first call of a size is prepared on each worker, which takes longer than tracing it.
        self.warming_up |= self._num_prepared[size] < self._shape.num_workers
        self._num_prepared[size] += 1
        rows = finished.outcome.result()
        self._num_ended += len(rows)
        # Every gradient is applied.
        by_worker = ({finished.worker: GradientCounts(accepted=1)},) * len(rows)
        return replace(self._calls.logs.unpack(rows), gradient_counts=by_worker)

    def _cancel_calls(self) -> None:
        super()._cancel_calls()
        self._in_flight.clear()

    def _has_no_data(self, finished: Finished) -> None:
        """Gives the calls of a worker without data to the others.

        Raises:
            tf.errors.OutOfRangeError: no worker has any.
        """
        coordinator = self._running()
        # It may have started another call in the meantime.
        is_new = coordinator.calls.disable(finished.worker, Disabled.NO_DATA)
        if not coordinator.calls.available:
            finished.outcome.result()
        if is_new:
            warn(f"{Task('worker', finished.worker)} has no data; training continues without it")
        coordinator.submit(self._call_of(finished.tag), tag=finished.tag)

    def _is_idle(self, finished: Finished) -> None:
        """Gives no more calls to a worker for which there is no split, until there may be one."""
        coordinator = self._running()
        self._in_flight[finished.tag] -= 1
        coordinator.calls.disable(finished.worker, Disabled.NO_DATA)
        self._idle.add(finished.worker)
        if not coordinator.calls.available:
            # Nobody would take them.
            self._take_calls_back()

    def drain(self) -> None:
        # Calls that only wait would double the time.
        self._take_calls_back()
        super().drain()

    def _take_calls_back(self) -> None:
        """Takes back the calls that no worker has begun."""
        if self._in_flight.total():
            for call in self._running().calls.take_back():
                self._in_flight[call.tag] -= 1

    @property
    def _num_applied(self) -> int:
        return (self._first_step or 0) + self._num_ended

    def _has_more_to_read(self) -> None:
        for worker in self._idle:
            self._running().calls.enable(worker, Disabled.NO_DATA)
        self._idle.clear()

    def _set_calls_aside(self) -> None:
        # What the workers evaluate they have.
        self._has_more_to_read()

    def _let_go(self) -> None:
        with suppress(AttributeError):
            del self._calls
        super()._let_go()


def _fetched(function: _Function, iterator: Any) -> np.ndarray:
    result: np.ndarray = fetch(function(iterator))
    return result
