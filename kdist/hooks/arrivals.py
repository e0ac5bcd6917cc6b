"""`Arrivals`: continues with data that keeps arriving where the checkpoint was, and waits when all of it is read."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist.console import lines
from kdist.data.splits import SplitQueue
from kdist.hooks.base import Hook, RunContext, RunValues, Session

#: Data may arrive in small pieces; not every wait is worth a line.
_LINE_SECS = 60.0


class Arrivals(Hook):
    """Comes before all hooks that save. A fit adds it by itself.

    Args:
        splits: of the data.
        clock: returns seconds; replaced in tests.
    """

    def __init__(self, splits: SplitQueue, clock: Callable[[], float] = time.monotonic) -> None:
        self._splits = splits
        self._clock = clock
        self._is_waiting = False
        self._told_at: float | None = None

    def after_create_session(self, session: Session) -> None:
        # Also if the session continues from the model of an earlier fit, which has saved its last step.
        state = session.checkpoints.data_state(session.global_step)
        if state is not None:
            self._splits.restore(state)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._is_waiting = False

    def while_waiting(self, session: Session) -> None:
        now = self._clock()
        if not self._is_waiting and (self._told_at is None or now - self._told_at >= _LINE_SECS):
            self._told_at = now
            place, idle_secs = self._splits.place, self._splits.idle_secs
            session.print_line(lines.wait_line(session.global_step, session.last_step, place, idle_secs))
        self._is_waiting = True
        if (ended_by := self._splits.wait()) is not None:
            session.request_stop(ended_by)
