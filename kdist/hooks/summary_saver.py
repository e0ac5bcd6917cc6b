"""`SummarySaver`: loss and metrics for TensorBoard. After `tf.compat.v1.train.SummarySaverHook`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.run.statistics import RunStatistics

if TYPE_CHECKING:
    from kdist.model.metrics import MetricTotals


class SummarySaver(TimedHook):
    """Writes `loss` and metrics of the steps since the last time, and `learning_rate`, to `tb/train`.

    With asynchronous workers it also writes a histogram `async/staleness`; with synchronous ones the number of
    accepted, dropped and stale gradients of each, as `sync/accepted/worker_0` and so on. Validation results go to
    `tb/validation` under the same names, so that TensorBoard draws both in one chart.

    Args:
        every_steps: steps between two values; 100 if neither is given. As in TF1 the first value covers the first
            step, and the steps count from there: 1, 101, 201, ...
        every_secs: seconds between two values.
        clock: returns seconds; replaced in tests.
    """

    _owner = "hooks.summary"
    _default_steps = 100
    _from_first_step = True

    def _forget(self) -> None:
        self._totals: MetricTotals | None = None
        self._staleness: list[np.ndarray] = []
        self._runs = RunStatistics()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._totals = values.totals if self._totals is None else self._totals + values.totals
        self._staleness.append(values.staleness)
        self._runs.add(values)
        if self._timer.due(values.global_step):
            self._write(context.session)

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        session.summaries.scalars("validation", logs, session.global_step)

    def end(self, session: Session) -> None:
        self._write(session)

    def _write(self, session: Session) -> None:
        if self._totals is None:
            return
        step = session.global_step
        logs = session.training_logs(self._totals)
        session.summaries.scalars("train", {**logs, "learning_rate": session.learning_rate()}, step)
        if session.is_asynchronous:
            session.summaries.histogram("train", "async/staleness", np.concatenate(self._staleness), step)
        else:
            for worker, counts in self._runs.gradients.by_worker.items():
                name = worker.replace(":", "_")
                by_tag = {f"sync/{what}/{name}": count for what, count in asdict(counts).items()}
                session.summaries.scalars("train", by_tag, step)
        self._forget()
        self._timer.restart(step)
