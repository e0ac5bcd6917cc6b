"""`LoggingTensor`: the console line. After `tf.compat.v1.train.LoggingTensorHook`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kdist.console import lines
from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.run.statistics import RunStatistics

if TYPE_CHECKING:
    from kdist.model.metrics import MetricTotals


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
        self._totals: MetricTotals | None = None
        self._runs = RunStatistics()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._totals = values.totals if self._totals is None else self._totals + values.totals
        self._runs.add(values)
        if self._timer.due(values.global_step):
            self._rate = self._runs.steps_per_second or self._rate
            session = context.session
            logs = session.training_logs(self._totals)
            step, last_step = values.global_step, session.last_step
            self._print(session, lines.train_line(step, last_step, logs, self._runs.applied, self._rate))
            for hook in session.hooks:
                hook.after_logging(session, logs, self._rate)
            self._timer.restart(values.global_step)
            self._forget()

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        self._print(session, lines.validation_line(session.global_step, session.last_step, logs))

    def _print(self, session: Session, line: str) -> None:
        (self._print_line or session.print_line)(line)
