"""`parameter_server`: asynchronous training, each worker at its own pace against shared parameters.

After DistBelief (Dean et al., 2012) and TF1's between-graph replication: a worker pulls the parameters, computes a
gradient on its own batch and pushes it; nobody waits for anybody.
"""

from __future__ import annotations

from collections import deque
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
    """Asynchronous parameter servers over TensorFlow's `ClusterCoordinator`. Args: see `OnServers`."""

    name: ClassVar[str] = "parameter_server"
    is_asynchronous: ClassVar[bool] = True

    _iterators: Any = None

    def start(self, program: Program) -> None:
        super().start(program)
        self._calls = self._program.calls(self._store, iterator_spec(self._make_dataset))
        self._sizer = self._program.sizer()

    def _run(self, num_steps: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        coordinator, iterators = self._running(), self._worker_iterators()
        coordinator.check_tasks()
        in_flight: deque[tuple[Any, int]] = deque()
        logs: StepLogs | None = None
        remaining = num_steps
        while remaining or in_flight:
            if interrupted():
                remaining = 0
            while remaining and len(in_flight) < _CALLS_IN_FLIGHT_PER_WORKER * self._shape.num_workers:
                size = self._sizer.next_size(remaining)
                self._warming_up |= not self._calls.traced(size)
                in_flight.append((coordinator.schedule(self._calls.function(size), iterators), size))
                remaining -= size
            if not in_flight:
                break
            value, size = in_flight.popleft()
            more = self._calls.logs(coordinator.result(value), size)
            logs = more if logs is None else logs + more
        return logs

    def _held_on_tasks(self) -> tuple[str, ...]:
        return ("_calls", "_iterators")

    def _worker_iterators(self) -> Any:
        """Iterators over the workers' data, made when the first step runs."""
        if self._iterators is None:
            data, num_workers, first_step = self._program.program.data, self._shape.num_workers, self.global_step()
            self._iterators = self._running().per_worker_iterators(
                self._make_dataset,
                lambda worker_index: worker_arguments(data, worker_index, num_workers, first_step),
            )
        return self._iterators
