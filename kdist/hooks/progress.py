"""`Progress`: a live line with the state of the run, on a terminal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kdist.console import lines
from kdist.console.live import LiveLine, live_line
from kdist.hooks.base import Hook, RunContext, RunValues, Session


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
