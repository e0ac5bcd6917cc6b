"""`CheckpointSaver`: saves while training goes on. After `tf.compat.v1.train.CheckpointSaverHook`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kdist.checks import check_whole_number
from kdist.errors import CheckpointError
from kdist.hooks.base import Hook, RunContext, RunValues
from kdist.hooks.timer import SecondOrStepTimer
from kdist.warn import warn

if TYPE_CHECKING:
    from kdist.session import TrainSession


class CheckpointSaverListener:
    """Is told of every checkpoint. After `tf.compat.v1.train.CheckpointSaverListener`; every method does nothing."""

    def begin(self) -> None:
        """Called once, before anything is restored."""

    def before_save(self, session: TrainSession, global_step: int) -> None:
        """Called before a checkpoint of `global_step` is written."""

    def after_save(self, session: TrainSession, global_step: int) -> bool | None:
        """Called when it is there; True ends training."""

    def end(self, session: TrainSession, global_step: int) -> None:
        """Called once at a clean end, after the last checkpoint."""


class CheckpointSaver(Hook):
    """Saves at the start, every so often, and at the end, into the session's checkpoint folder.

    A save that fails (a disk that is full) costs a warning, and the next one is tried when it is due; if the last one
    fails, so does the run.

    Args:
        every_secs: seconds between saves; 600 if neither is given, as in TF1.
        every_steps: steps between saves.
        keep: how many checkpoints to keep; the oldest are deleted.
        listeners: told of every checkpoint.
        clock: seconds from any start; a test's own.

    Raises:
        ConfigError: a value out of range.
        CheckpointError: from `end`: the last save failed.
    """

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        keep: int = 5,
        listeners: Sequence[CheckpointSaverListener] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_whole_number("hooks.checkpoint.keep", keep)
        if every_secs is None and every_steps is None:
            every_secs = 600.0
        self._timer = SecondOrStepTimer(
            every_steps=every_steps, every_secs=every_secs, owner="hooks.checkpoint", clock=clock
        )
        self._keep = keep
        self._listeners = list(listeners)

    def begin(self, session: TrainSession) -> None:
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: TrainSession) -> None:
        self._try_to_save(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._timer.due(values.global_step):
            self._try_to_save(context.session)

    def end(self, session: TrainSession) -> None:
        self._save(session)
        for listener in self._listeners:
            listener.end(session, session.global_step)

    def due_in(self, step: int) -> int | None:
        return self._timer.due_in(step)

    def idle_in(self, step: int) -> int | None:
        # Steps are exact. When it is the clock that decides, saving itself waits for what is in flight.
        return self._timer.due_in(step)

    def _try_to_save(self, session: TrainSession) -> None:
        try:
            self._save(session)
        except CheckpointError as error:
            # At the last step `end` tries once more, and says so itself.
            if not session.should_stop():
                what = str(error).replace("\n  ", "; ")
                warn(f"{what}; training goes on")
        self._timer.restart(session.global_step)

    def _save(self, session: TrainSession) -> None:
        if session.is_saved:
            return
        step = session.global_step
        for listener in self._listeners:
            listener.before_save(session, step)
        session.save(keep=self._keep)
        for listener in self._listeners:
            if listener.after_save(session, step):
                session.request_stop(type(listener).__name__)
