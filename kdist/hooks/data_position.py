"""`DataPosition`: continues with data that may end where the checkpoint was, and ends training with it."""

from __future__ import annotations

from kdist.data.splits import SplitQueue, Splits
from kdist.hooks.arrivals import Arrivals
from kdist.hooks.base import Hook, Session
from kdist.log import warn

#: Data whose cost was told; once is enough for programs that call `fit` in a loop.
_warned_of: set[str] = set()


class DataPosition(Hook):
    """Comes before all hooks that save. A fit adds it by itself.

    Args:
        splits: of the data.
        resumes: whether the session resumes a run; otherwise its first step is the beginning of the data.
    """

    def __init__(self, splits: Splits, *, resumes: bool) -> None:
        self._splits = splits
        self._first_step: int | None = None
        self._resumes = resumes

    def begin(self, session: Session) -> None:
        if session.strategy.has_workers and self._splits.pass_through_chief and self._splits.place not in _warned_of:
            _warned_of.add(self._splits.place)
            warn(
                f"{self._splits.place} is read in this process, which sends every batch to the workers: one step is "
                "one call, and more workers do not read faster; a function (context) -> tf.data.Dataset lets each "
                "worker read for itself"
            )
        self._splits.begin(lambda: session.interrupted)

    def after_create_session(self, session: Session) -> None:
        is_start = self._first_step is None
        if self._first_step is None:
            self._first_step = session.global_step
        if self._resumes or session.global_step > self._first_step:
            self._splits.restore(session.checkpoints.data_state(session.global_step))
        elif not is_start:
            # Its checkpoint is of the fit before.
            self._splits.restore(None)

    def while_waiting(self, session: Session) -> None:
        if (ended_by := self._splits.wait()) is not None:
            warn(f"training ends at step {session.global_step} with {ended_by}")
            session.request_stop(ended_by)

    def close(self) -> None:
        self._splits.close()


def hooks_of(splits: Splits | None, *, resumes: bool) -> list[Hook]:
    """What a session needs for its data, if that may end."""
    if splits is None:
        return []
    if splits.arrive and isinstance(splits, SplitQueue):
        return [Arrivals(splits)]
    return [DataPosition(splits, resumes=resumes)]
