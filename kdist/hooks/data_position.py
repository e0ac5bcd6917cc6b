"""Hooks for data that can end: they continue where the checkpoint was, wait for more, and end training with it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist.console import lines
from kdist.data.shares import ShareQueue, shares_in
from kdist.data.splits import SplitQueue, Splits
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.log import warn
from kdist.run.resizes import Resize

#: Data may arrive in small pieces; not every wait is worth a line.
_LINE_SECS = 60.0
#: Data whose cost was told; once is enough for programs that call `fit` in a loop.
_warned_of: set[str] = set()


class DataPosition(Hook):
    """Continues with data that may end where the checkpoint was, and ends training with it.

    A fit adds it by itself, before all hooks that save.

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
                f"{self._splits.place} is read in this process, which sends every batch to the workers: each step "
                "is one call, so more workers do not read faster; a function (context) -> tf.data.Dataset lets each "
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


class Arrivals(DataPosition):
    """Continues with data that keeps arriving where the checkpoint was, and waits when all of it is read.

    Args:
        clock: returns seconds; replaced in tests.
    """

    def __init__(self, splits: SplitQueue, clock: Callable[[], float] = time.monotonic) -> None:
        # Also if the session continues from the model of an earlier fit, which has saved its last step.
        super().__init__(splits, resumes=True)
        self._idle_secs = splits.idle_secs
        self._clock = clock
        self._is_waiting = False
        self._told_at: float | None = None

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._is_waiting = False

    def while_waiting(self, session: Session) -> None:
        now = self._clock()
        if not self._is_waiting and (self._told_at is None or now - self._told_at >= _LINE_SECS):
            self._told_at = now
            place = self._splits.place
            session.print_line(lines.wait_line(session.global_step, session.last_step, place, self._idle_secs))
        self._is_waiting = True
        if (ended_by := self._splits.wait()) is not None:
            session.request_stop(ended_by)


class SharesPosition(DataPosition):
    """Continues with shares that any number of workers read, also from a checkpoint of before they were shared."""

    _splits: ShareQueue

    def after_create_session(self, session: Session) -> None:
        self._splits.last_step = session.last_step if session.is_asynchronous else None
        state = session.checkpoints.data_state(session.global_step) if self._resumes else None
        self._splits.restore_at(session.global_step, state if shares_in(state) else None)

    def after_resize(self, session: Session, resize: Resize) -> None:
        self._splits.end_at(session.last_step if session.is_asynchronous else None)


def hooks_of(splits: Splits | None, *, resumes: bool) -> list[Hook]:
    """Hooks for data that can end; none for other data."""
    if isinstance(splits, SplitQueue):
        return [Arrivals(splits)]
    if isinstance(splits, ShareQueue):
        return [SharesPosition(splits, resumes=resumes)]
    return [] if splits is None else [DataPosition(splits, resumes=resumes)]
