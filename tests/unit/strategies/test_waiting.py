"""Time that synchronous training spends on waiting for lost workers, without any process."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kdist.strategies import on_store, sync_replicas
from kdist.strategies.call_logs import StepLogs
from kdist.strategies.sync_replicas import Quorum, SyncReplicas


class Waiting(SyncReplicas):
    """A step of three seconds, before which a lost worker does not return."""

    def __init__(self, pause: Any) -> None:
        self._quorum, self._worker_timeout, self._on_lost_worker = Quorum(2, 2, False), 60.0, "continue"
        self._pause, self._done_without = pause, set()
        self.observed: list[float] = []

    def _reachable(self) -> int:
        return 1

    def _lost(self) -> set[int]:
        return {1}

    def _running(self) -> Any:
        return Mock(wait_a_moment=self._pause)

    @property
    def is_idle(self) -> bool:
        return True

    def _next_logs(self, may_begin: int, interrupted: Any) -> StepLogs:
        self._wait_for_lost()
        self._pause(3.0)
        metrics: Any = SimpleNamespace()
        return StepLogs(np.ones(1, np.int64), np.zeros(1, np.int64), metrics)

    def _observe(self, num_steps: int, secs: float) -> None:
        self.observed.append(secs)


def test_waiting_for_lost_workers_is_not_part_of_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    for module in (on_store, sync_replicas):
        monkeypatch.setattr(module, "time", clock)

    def pause(secs: float) -> None:
        now[0] += secs

    strategy = Waiting(pause)
    with pytest.warns(UserWarning, match="did not come back"):
        strategy.run(1, lambda: False)

    assert now[0] == 163.0
    assert strategy.observed == [3.0]
