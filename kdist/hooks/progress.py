"""`Progress`: on a terminal, one line that tells how the run is right now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kdist import console
from kdist.hooks.base import Hook, RunContext, RunValues
from kdist.live_line import LiveLine, live_line

if TYPE_CHECKING:
    from kdist.session import TrainSession


class Progress(Hook):
    """Shows step, loss and metrics, rate, time left, staleness and restarts, below the lines that are printed.

    Where standard output is no terminal it shows nothing. `fit(verbose=1)` and `run.verbose=1` bring it along.

    Args:
        make_line: makes what it shows that with; nothing is shown if there is None.
    """

    def __init__(self, make_line: Callable[[], LiveLine | None] = live_line) -> None:
        self._make_line = make_line
        self._line: LiveLine | None = None

    def after_create_session(self, session: TrainSession) -> None:
        self._line = self._line or self._make_line()
        if self._line is not None:
            self._line.prepare()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._line is not None:
            session = context.session
            self._line.show(values.global_step, session.last_step, _columns(session, values))

    def end(self, session: TrainSession) -> None:
        self.close()

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def idle_in(self, step: int) -> int | None:
        return None


def _columns(session: TrainSession, values: RunValues) -> list[str]:
    rate = values.num_steps / values.seconds if values.seconds and not values.warming_up else None
    columns = console.train_columns(values.global_step, session.last_step, values.totals.logs, rate)
    if session.is_asynchronous:
        columns.append(f"staleness {np.mean(values.staleness):.1f}")
    columns += [f"{what} restarts {count}" for what, count in session.restarts.items() if count]
    return columns
