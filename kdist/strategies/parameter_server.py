"""`parameter_server`: asynchronous training, each worker at its own pace against shared parameters.

After DistBelief (Dean et al., 2012) and TF1's between-graph replication: a worker pulls the parameters, computes a
gradient on its own batch and pushes it; nobody waits for anybody.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar

from kdist.cluster.coordinator import iterator_spec
from kdist.data import worker_arguments
from kdist.strategies.base import Program
from kdist.strategies.calls import StepLogs
from kdist.strategies.on_servers import OnServers

# A second call waits at each worker while the first runs; more would only sit in the chief's memory.
_CALLS_IN_FLIGHT_PER_WORKER = 2


class ParameterServer(OnServers):
    """Asynchronous parameter servers over TensorFlow's `ClusterCoordinator`. Args: those of `OnServers`.

    Args:
        local_steps: batches of a push, and of one step: see `LocalSteps`.
    """

    name: ClassVar[str] = "parameter_server"
    is_asynchronous: ClassVar[bool] = True

    def __init__(self, *args: Any, local_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches_per_step = local_steps
        self._iterators: Any = None
        self._in_flight: deque[tuple[Any, int]] = deque()
        #: How many calls of each size have ended.
        self._ended: Counter[int] = Counter()

    def start(self, program: Program) -> None:
        super().start(program)
        self._calls = self._program.calls(self._store, iterator_spec(self._make_dataset), self.batches_per_step)
        self._sizer = self._program.sizer()

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        coordinator, iterators = self._running(), self._worker_iterators()
        while len(self._in_flight) < _CALLS_IN_FLIGHT_PER_WORKER * self._shape.num_workers and not interrupted():
            may_begin_more = may_begin - self._num_in_flight
            if may_begin_more <= 0:
                break
            size = self._sizer.next_size(may_begin_more)
            self._warming_up |= not self._calls.traced(size)
            self._in_flight.append((coordinator.schedule(self._calls.function(size), iterators), size))
        return self._in_flight_logs()

    @property
    def _num_in_flight(self) -> int:
        return sum(size for _, size in self._in_flight)

    def _in_flight_logs(self) -> StepLogs | None:
        if not self._in_flight:
            return None
        value, size = self._in_flight.popleft()
        # A worker that gets the first call of a size prepares it, which takes longer than tracing it.
        self._warming_up |= self._ended[size] < self._shape.num_workers
        self._ended[size] += 1
        return self._calls.logs(self._running().result(value))

    def _held_on_tasks(self) -> tuple[str, ...]:
        return ("_calls", "_iterators", "_in_flight")

    def _worker_iterators(self) -> Any:
        """Iterators over the workers' data, made when the first step runs."""
        if self._iterators is None:
            data, num_workers, first_step = self._program.program.data, self._shape.num_workers, self.global_step()
            self._iterators = self._running().per_worker_iterators(
                self._make_dataset,
                lambda worker_index: worker_arguments(data, worker_index, num_workers, first_step),
            )
        return self._iterators
