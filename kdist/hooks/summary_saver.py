"""`SummarySaver`: loss and metrics for TensorBoard. After `tf.compat.v1.train.SummarySaverHook`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from kdist.hooks.base import Hook, RunContext, RunValues
from kdist.hooks.timer import SecondOrStepTimer
from kdist.result import Contributions, add_contributions

if TYPE_CHECKING:
    from kdist.metrics import MetricTotals
    from kdist.session import TrainSession


class SummarySaver(Hook):
    """Writes `loss`, each metric and `learning_rate`, over the steps since the last time, to `tb/train`.

    With asynchronous workers also a histogram `async/staleness`; with synchronous ones how many gradients of each were
    accepted, dropped and stale, as `sync/accepted/worker_0` and so on. Validation results go to `tb/validation` under
    the same names, so that TensorBoard draws both in one chart.

    Args:
        every_steps: steps between two values; 100 if neither is given. As in TF1 the first value is that of the first
            step, and the steps count from there: 1, 101, 201, ...
        every_secs: seconds between two values.
        clock: seconds from any start; a test's own.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is None and every_secs is None:
            every_steps = 100
        self._timer = SecondOrStepTimer(
            every_steps=every_steps, every_secs=every_secs, owner="hooks.summary", from_first_step=True, clock=clock
        )
        self._totals: MetricTotals | None = None
        self._staleness: list[np.ndarray] = []
        self._contributions: dict[int, Contributions] = {}

    def after_create_session(self, session: TrainSession) -> None:
        self._timer.start(session.global_step)
        self._totals, self._staleness, self._contributions = None, [], {}

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._totals = values.totals if self._totals is None else self._totals + values.totals
        self._staleness.append(values.staleness)
        self._contributions = add_contributions(self._contributions, values.contributions)
        if self._timer.due(values.global_step):
            self._write(context.session)

    def after_validation(self, session: TrainSession, logs: Mapping[str, float]) -> None:
        session.summaries.scalars("validation", logs, session.global_step)

    def end(self, session: TrainSession) -> None:
        if self._totals is not None:
            self._write(session)

    def due_in(self, step: int) -> int | None:
        return self._timer.due_in(step)

    def idle_in(self, step: int) -> int | None:
        return None

    def _write(self, session: TrainSession) -> None:
        if self._totals is None:
            return
        step = session.global_step
        session.summaries.scalars("train", {**self._totals.logs, "learning_rate": session.learning_rate()}, step)
        if session.is_asynchronous:
            session.summaries.histogram("train", "async/staleness", np.concatenate(self._staleness), step)
        else:
            for worker, counts in self._contributions.items():
                by_tag = {f"sync/{what}/worker_{worker}": count for what, count in asdict(counts).items()}
                session.summaries.scalars("train", by_tag, step)
        self._totals, self._staleness, self._contributions = None, [], {}
        self._timer.restart(step)
