"""Reports of training, on the console and to TensorBoard. After TF1's hooks of these names, but for `Progress`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.console import lines
from kdist.console.live import LiveLine, live_line
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.run.statistics import RunStatistics

if TYPE_CHECKING:
    from kdist.model.metrics import MetricTotals


class RunTotals(RunStatistics):
    """Adds up runs with their loss and metrics; there are `totals` once an update is `applied`."""

    totals: MetricTotals

    def add(self, values: RunValues, extra_steps: int = 0) -> None:
        self.totals = self.totals + values.totals if self.applied else values.totals
        super().add(values, extra_steps)


class LoggingTensor(TimedHook):
    """Prints loss and metrics of the steps since the last line, their number, rate and remaining time.

    The rate leaves out steps in which functions were traced.

    Args:
        every_steps: steps between two lines; 100 if neither is given, as in TF1.
        every_secs: seconds between two lines.
        print_line: prints a line; the session's own if None, which `fit(verbose=0)` silences.
        clock: returns seconds; replaced in tests.
    """

    _owner = "hooks.logging"
    _default_steps = 100

    def __init__(
        self,
        every_steps: int | None = None,
        every_secs: float | None = None,
        print_line: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(every_steps, every_secs, clock)
        self._print_line = print_line
        self._rate: float | None = None

    def _forget(self) -> None:
        self._runs = RunTotals()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._runs.add(values)
        super().after_run(context, values)

    def _act(self, session: Session) -> None:
        self._rate = self._runs.steps_per_second or self._rate
        logs = session.training_logs(self._runs.totals)
        step, last_step = session.global_step, session.last_step
        self._print(session, lines.train_line(step, last_step, logs, self._runs.applied, self._rate))
        for hook in session.hooks:
            hook.after_logging(session, logs, self._rate)

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        self._print(session, lines.validation_line(session.global_step, session.last_step, logs))

    def _print(self, session: Session, line: str) -> None:
        (self._print_line or session.print_line)(line)


class Progress(Hook):
    """Shows step, loss and metrics, rate, time left, staleness and restarts, below the lines that are printed.

    It shows nothing if standard output is neither a terminal nor in a notebook. `fit(verbose=1)` and `run.verbose=1`
    add it.

    Args:
        make_line: makes the line; None shows nothing.
    """

    def __init__(self, make_line: Callable[[], LiveLine | None] = live_line) -> None:
        self._make_line = make_line
        self._line: LiveLine | None = None

    def after_create_session(self, session: Session) -> None:
        self._line = self._line or self._make_line()
        if self._line is not None:
            self._line.prepare()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._line is not None:
            session = context.session
            self._line.show(values.global_step, session.last_step, _columns(session, values))

    def end(self, session: Session) -> None:
        self.close()

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def _columns(session: Session, values: RunValues) -> list[str]:
    rate = values.num_steps / values.seconds if values.seconds and not values.warming_up else None
    logs = session.training_logs(values.totals)
    columns = lines.train_columns(values.global_step, session.last_step, logs, rate)
    if session.is_asynchronous:
        columns.append(f"staleness {np.mean(values.staleness):.1f}")
    columns += [f"{what} restarts {count}" for what, count in session.restarts.items() if count]
    return columns


class StepCounter(TimedHook):
    """Writes `perf/steps_per_sec` and `perf/examples_per_sec` to TensorBoard.

    With parameter servers also `perf/steps_per_sec/worker_0` and so on: the rates of each worker's gradients that were
    part of an update.

    Args:
        every_steps: steps between two values; 100 if neither is given, as in TF1.
        every_secs: seconds between two values.
        clock: returns seconds; replaced in tests.
    """

    _owner = "hooks.step_counter"
    _default_steps = 100

    def _forget(self) -> None:
        self._steady = RunStatistics()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if not values.warming_up:
            self._steady.add(values)
        super().after_run(context, values)

    def _act(self, session: Session) -> None:
        steps_per_sec, examples_per_sec = self._steady.steps_per_second, self._steady.examples_per_second
        if steps_per_sec is not None and examples_per_sec is not None:
            self.report(session, steps_per_sec, examples_per_sec)
            if of_workers := self._of_workers(steps_per_sec, examples_per_sec):
                session.summaries.scalars("train", of_workers, session.global_step)

    def report(self, session: Session, steps_per_sec: float, examples_per_sec: float) -> None:
        """Reports the speed of training over all replicas; tracing does not count."""
        scalars = {"perf/steps_per_sec": steps_per_sec, "perf/examples_per_sec": examples_per_sec}
        session.summaries.scalars("train", scalars, session.global_step)

    def _of_workers(self, steps_per_sec: float, examples_per_sec: float) -> dict[str, float]:
        """The rates of each worker, by tag."""
        by_worker = self._steady.gradients.by_worker
        num_all = max(1, sum(counts.accepted for counts in by_worker.values()))
        rates = {}
        for worker, counts in by_worker.items():
            name = worker.replace(":", "_")
            rates[f"perf/steps_per_sec/{name}"] = steps_per_sec * counts.accepted / max(1, self._steady.applied)
            # All batches are full and have the same size.
            rates[f"perf/examples_per_sec/{name}"] = examples_per_sec * counts.accepted / num_all
        return rates


class SummarySaver(TimedHook):
    """Writes `loss` and metrics of the steps since the last time, and `updates/learning_rate`, to `tb/train`.

    With asynchronous workers it also writes a histogram `updates/staleness`; with synchronous ones the number of
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
        self._runs = RunTotals()
        self._staleness: list[np.ndarray] = []

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._runs.add(values)
        self._staleness.append(values.staleness)
        super().after_run(context, values)

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        session.summaries.scalars("validation", logs, session.global_step)

    def end(self, session: Session) -> None:
        if self._runs.applied:
            self._act(session)

    def _act(self, session: Session) -> None:
        step, logs = session.global_step, session.training_logs(self._runs.totals)
        # TensorBoard sorts tags by name and opens the first ones: `updates/` is behind loss and Keras's metrics.
        session.summaries.scalars("train", {**logs, "updates/learning_rate": session.learning_rate()}, step)
        if session.is_asynchronous:
            session.summaries.histogram("train", "updates/staleness", np.concatenate(self._staleness), step)
        else:
            by_worker = self._runs.gradients.by_worker.items()
            by_tag = {
                f"sync/{what}/{worker.replace(':', '_')}": count
                for worker, counts in by_worker
                for what, count in asdict(counts).items()
            }
            session.summaries.scalars("train", by_tag, step)
