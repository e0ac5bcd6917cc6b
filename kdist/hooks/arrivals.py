"""`Arrivals`: continues with data that keeps arriving where the checkpoint was, and waits when all of it is read."""

from __future__ import annotations

from kdist.console import lines
from kdist.data.splits import SplitQueue
from kdist.hooks.base import Hook, RunContext, RunValues, Session


class Arrivals(Hook):
    """Comes before all hooks that save. A fit adds it by itself.

    Args:
        splits: of the data.
    """

    def __init__(self, splits: SplitQueue) -> None:
        self._splits = splits
        self._has_told = False

    def after_create_session(self, session: Session) -> None:
        # Also if the session continues from the model of an earlier fit, which has saved its last step.
        state = session.checkpoints.data_state(session.global_step)
        if state is not None:
            self._splits.restore(state)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._has_told = False

    def while_waiting(self, session: Session) -> None:
        if not self._has_told:
            self._has_told = True
            place, idle_secs = self._splits.place, self._splits.idle_secs
            session.print_line(lines.wait_line(session.global_step, session.last_step, place, idle_secs))
        if (ended_by := self._splits.wait()) is not None:
            session.request_stop(ended_by)
