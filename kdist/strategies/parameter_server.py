"""`parameter_server`: asynchronous training, each worker at its own pace against shared parameters.

After DistBelief (Dean et al., 2012) and TF1's between-graph replication: a worker pulls the parameters, computes a
gradient on its own batch and pushes it; nobody waits for anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from kdist.cluster.coordinator import fetch
from kdist.cluster.lanes import Finished
from kdist.cluster.spec import Task
from kdist.result import Contributions
from kdist.strategies.base import Program
from kdist.strategies.calls import StepLogs
from kdist.strategies.on_servers import OnServers
from kdist.warn import warn
from kdist.worker_data import iterator_spec

# A second call waits at each worker while the first runs; more would only sit in the chief's memory.
_CALLS_IN_FLIGHT_PER_WORKER = 2


class ParameterServer(OnServers):
    """Asynchronous parameter servers. Args: those of `OnServers`.

    Args:
        local_steps: batches of a push, and of one step: see `LocalSteps`.
    """

    name: ClassVar[str] = "parameter_server"
    is_asynchronous: ClassVar[bool] = True

    def __init__(self, *args: Any, local_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches_per_step = local_steps
        #: Over each worker's data, made when its first step runs.
        self._iterators: dict[int, Any] = {}
        self._first_step: int | None = None
        #: How many losses of workers the counters of the servers take account of.
        self._aligned_after = 0
        #: How many calls of each size are in flight, and how many have ended.
        self._in_flight: Counter[int] = Counter()
        self._ended: Counter[int] = Counter()

    def start(self, program: Program) -> None:
        super().start(program)
        self._calls = self._program.calls(self._store, iterator_spec(self._make_dataset), self.batches_per_step)
        self._sizer = self._program.sizer()

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if self._first_step is None:
            self._first_step = self.global_step()
        coordinator = self._running()
        while self._in_flight.total() < _CALLS_IN_FLIGHT_PER_WORKER * self._shape.num_workers and not interrupted():
            may_begin_more = may_begin - self._num_in_flight
            if may_begin_more <= 0:
                break
            size = self._sizer.next_size(may_begin_more)
            if not self._calls.traced(size):
                self._warming_up = True
                coordinator.before_tracing()
            function = self._calls.function(size)
            coordinator.submit(partial(self._call, function), tag=size)
            self._in_flight[size] += 1
            del function
        return self._in_flight_logs()

    def employ(self, workers: Collection[int]) -> None:
        self._running().employ(workers)

    def global_step(self) -> int:
        self.settle()
        if (num_lost := self._running().num_lost) > self._aligned_after:
            self._watched(self._store.align)
            self._aligned_after = num_lost
        return super().global_step()

    def _call(self, function: tf.types.experimental.ConcreteFunction, worker: int) -> np.ndarray:
        if worker not in self._iterators:
            # A worker that comes back reads on from where training is.
            step = (self._first_step or 0) + sum(size * number for size, number in self._ended.items())
            arguments = self._program.worker_arguments(worker, step, self.batches_per_step)
            self._iterators[worker] = iter(self._make_dataset(*arguments))
        return fetch(function(self._iterators[worker]))

    @property
    def _num_in_flight(self) -> int:
        return sum(size * number for size, number in self._in_flight.items())

    def _in_flight_logs(self) -> StepLogs | None:
        if not self._in_flight.total():
            return None
        coordinator = self._running()
        while isinstance((finished := coordinator.next_finished()).outcome.exception(), tf.errors.OutOfRangeError):
            self._has_no_data(finished)
        size = finished.tag
        self._in_flight[size] -= 1
        # A worker that gets the first call of a size prepares it, which takes longer than tracing it.
        self._warming_up |= self._ended[size] < self._shape.num_workers
        self._ended[size] += 1
        # Every gradient is applied.
        by_worker = ({finished.worker: Contributions(accepted=1)},) * size
        return replace(self._calls.logs(finished.outcome.result()), contributions=by_worker)

    def _forget_in_flight(self) -> None:
        self._in_flight.clear()

    def _has_no_data(self, finished: Finished) -> None:
        """Leaves the calls of a worker that has no data to the others.

        Raises:
            tf.errors.OutOfRangeError: none of them has any.
        """
        coordinator = self._running()
        is_new = coordinator.retire(finished.worker)
        if not coordinator.present:
            finished.outcome.result()
        if is_new:
            warn(f"{Task('worker', finished.worker)} has no data; training goes on without it")
        coordinator.submit(partial(self._call, self._calls.function(finished.tag)), tag=finished.tag)

    def _worker_is_back(self, worker: int) -> None:
        self._iterators.pop(worker, None)

    @property
    def _in_call(self) -> bool:
        return self._in_flight.total() > 0

    def _held_on_tasks(self) -> tuple[str, ...]:
        return ("_calls", "_iterators")
