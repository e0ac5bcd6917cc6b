"""`MetricsRecorder`: writes what training and validation report to `metrics.csv`; every fit has one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.cluster.spec import ClusterShape
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.run.metrics_file import EPOCH, RESIZE, TRAIN, VALIDATION, MetricsFile, Row
from kdist.run.resizes import Resize
from kdist.run.statistics import RunStatistics


class MetricsRecorder(Hook):
    """Writes a line when `LoggingTensor` reports, after each validation, and at the end of each epoch.

    Args:
        file: of the run.
        clock: returns seconds; replaced in tests.

    Attributes:
        epoch_of: the number of the epoch, from 0, to which a step belongs.
        earlier_rows: rows of the steps before the present session, or before its last recovery.
    """

    def __init__(self, file: MetricsFile, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch_of: Callable[[int], int] = lambda _: 0
        self.earlier_rows: Sequence[Row] = ()
        self._file = file
        self._clock = clock

    def after_create_session(self, session: Session) -> None:
        rows = self.earlier_rows = self._file.begin(session.global_step)
        # The time continues from the last row.
        self._began = self._clock() - (rows[-1].get("seconds", 0.0) if rows else 0.0)
        self._since_report, self._in_epoch = RunStatistics(), RunStatistics()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._since_report.add(values)
        self._in_epoch.add(values)

    def after_logging(self, session: Session, logs: Mapping[str, Any], steps_per_second: float | None) -> None:
        self._write(session, TRAIN, self.epoch_of(session.global_step), logs, self._since_report, steps_per_second)
        self._since_report = RunStatistics()

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        logs = {f"val_{name}": value for name, value in logs.items()}
        self._write(session, VALIDATION, self.epoch_of(session.global_step), logs)

    def after_resize(self, session: Session, resize: Resize) -> None:
        for shape in map(ClusterShape.of_text, (resize.before, resize.after)):
            # Both at this step: TensorBoard draws a vertical line.
            numbers = {"cluster/workers": shape.num_workers, "cluster/servers": shape.num_ps}
            session.summaries.scalars("train", numbers, session.global_step)
        tasks = {"workers": shape.num_workers, "servers": shape.num_ps}
        self._write(session, RESIZE, self.epoch_of(session.global_step), tasks)

    def end_epoch(self, session: Session, epoch: int, logs: Mapping[str, Any]) -> None:
        """Writes the line of an epoch; `logs` are its values in `History`."""
        self._write(session, EPOCH, epoch, logs, self._in_epoch, self._in_epoch.steps_per_second)
        self._in_epoch = RunStatistics()

    def _write(
        self,
        session: Session,
        kind: str,
        epoch: int,
        metrics: Mapping[str, Any],
        runs: RunStatistics | None = None,
        steps_per_second: float | None = None,
    ) -> None:
        values = {
            "step": session.global_step,
            "epoch": epoch,
            "kind": kind,
            "seconds": round(self._clock() - self._began, 3),
            "learning_rate": session.learning_rate(),
            "steps_per_second": steps_per_second,
            "staleness": runs.gradients.staleness_mean if runs and runs.applied and session.is_asynchronous else None,
        }
        self._file.append(values, metrics)
