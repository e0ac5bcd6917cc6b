"""`CheckpointSaver`: saves checkpoints during training. After `tf.compat.v1.train.CheckpointSaverHook`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kdist.config.checks import check_whole_number
from kdist.errors import CheckpointError
from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.log import warn


class CheckpointSaverListener:
    """Is notified of every checkpoint; every method does nothing. After TF1's class of that name."""

    def begin(self) -> None:
        """Called once, before anything is restored."""

    def before_save(self, session: Session, global_step: int) -> None:
        """Called before a checkpoint of `global_step` is written."""

    def after_save(self, session: Session, global_step: int) -> bool | None:
        """Called when it was written; True ends training."""

    def end(self, session: Session, global_step: int) -> None:
        """Called once at a clean end, after the last checkpoint."""


class CheckpointSaver(TimedHook):
    """Saves at the start, at intervals, and at the end, into the session's checkpoint folder.

    A save that fails (a full disk) costs a warning, and the next one is attempted when it is due; if the last one
    fails, so does the run.

    Args:
        every_secs: seconds between saves; 600 if neither is given, as in TF1.
        every_steps: steps between saves.
        keep: the number of full checkpoints to keep; the oldest are deleted, with their deltas.
        listeners: notified of every checkpoint.
        clock: returns seconds; replaced in tests.
        background: training continues while a checkpoint is written, except the first and the last one. Until then,
            each task needs memory for a copy of its values. A save that is due earlier waits.
        full_every: one checkpoint in `full_every` is full; the others are deltas with only the changed rows of tables
            (`kdist.layers.Embedding`, `DynamicEmbedding`), and `Hook.after_delta` gets their paths. The first and the
            last checkpoint of a run are full, and one after values of tables were set or restored; a run that a signal
            ends may end with a delta. Servers need 4 bytes more for each row.

    Raises:
        ConfigError: a value is out of range.
        CheckpointError: from `end`: the last save failed.
    """

    _owner = "hooks.checkpoint"

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        keep: int = 5,
        listeners: Sequence[CheckpointSaverListener] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        background: bool = False,
        full_every: int = 1,
    ) -> None:
        check_whole_number("hooks.checkpoint.keep", keep)
        check_whole_number("hooks.checkpoint.full_every", full_every, required=True)
        if every_secs is None and every_steps is None:
            every_secs = 600.0
        super().__init__(every_steps, every_secs, clock)
        self._keep = keep
        self.full_every = full_every
        self._background = background
        #: The step of a checkpoint that is being written in the background.
        self._begun_at = 0
        self._listeners = list(listeners)

    def begin(self, session: Session) -> None:
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session) -> None:
        # Without it, nothing could be resumed.
        self._trying(session, self._save)
        self._timer.restart(session.global_step)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._save_if_due(context.session, values.global_step)

    def while_waiting(self, session: Session) -> None:
        self._save_if_due(session, session.global_step)

    def end(self, session: Session) -> None:
        self._trying(session, self._finish)
        # After a signal there may not be time for a full one.
        self._save(session, self.full_every if session.interrupted else 1)
        for listener in self._listeners:
            listener.end(session, session.global_step)

    def idle_in(self, step: int) -> int | None:
        # Steps are exact. If the clock decides, saving itself waits for steps in flight.
        return self.due_in(step)

    def _save_if_due(self, session: Session, step: int) -> None:
        self._trying(session, self._finish, wait=False)
        if self._timer.due(step):
            self._trying(session, self._begin if self._background else self._save)
            self._timer.restart(session.global_step)

    def _trying(self, session: Session, function: Callable[..., None], **arguments: bool) -> None:
        """Calls a function that saves; a failure costs a warning."""
        try:
            function(session, **arguments)
        except CheckpointError as error:
            # At the last step `end` tries again, and raises the error.
            if not session.should_stop():
                warn(str(error).replace("\n  ", "; ") + "; training continues")

    def _save(self, session: Session, full_every: int | None = None) -> None:
        full_every = full_every or self.full_every
        if session.is_saved_in_full if full_every == 1 else session.is_saved:
            return
        step = self._before_save(session)
        session.save(keep=self._keep, full_every=full_every)
        self._after_save(session, step)

    def _begin(self, session: Session) -> None:
        self._finish(session)
        if not session.is_saved:
            self._begun_at = self._before_save(session)
            session.begin_save(full_every=self.full_every)

    def _finish(self, session: Session, *, wait: bool = True) -> None:
        if session.finish_save(keep=self._keep, wait=wait):
            self._after_save(session, self._begun_at)

    def _before_save(self, session: Session) -> int:
        for listener in self._listeners:
            listener.before_save(session, session.global_step)
        return session.global_step

    def _after_save(self, session: Session, step: int) -> None:
        for listener in self._listeners:
            if listener.after_save(session, step):
                session.request_stop(type(listener).__name__)
