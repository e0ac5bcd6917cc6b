"""Hooks that end training by its step or its loss. After TF1's `StopAtStepHook` and `NanTensorHook`."""

from __future__ import annotations

import math

from kdist.config.checks import check_whole_number
from kdist.errors import ConfigError, NonFiniteError
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.run.resizes import Resize


class StopAtStep(Hook):
    """Stops at a global step, never past it.

    Args:
        num_steps: stop after this many further steps.
        last_step: stop at this global step. If neither is given, the step that was passed to `fit` counts.

    Raises:
        ConfigError: both are given, or one is less than 1.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if num_steps is not None and last_step is not None:
            raise ConfigError(f"StopAtStep: give num_steps={num_steps} or last_step={last_step}, not both")
        check_whole_number("StopAtStep.num_steps", num_steps)
        check_whole_number("StopAtStep.last_step", last_step)
        self._num_steps = num_steps
        self._configured_last_step = last_step
        self.follows_fit = num_steps is None and last_step is None
        self.last_step = last_step

    def begin(self, session: Session) -> None:
        self.last_step = self._configured_last_step

    def after_create_session(self, session: Session) -> None:
        if self.last_step is None:
            self.last_step = session.last_step if self._num_steps is None else session.global_step + self._num_steps
        self._stop_if_reached(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._stop_if_reached(context.session)

    def after_resize(self, session: Session, resize: Resize) -> None:
        # A step of another number of workers has other batches.
        if self.follows_fit:
            self.last_step = session.last_step

    def due_in(self, step: int) -> int | None:
        return None if self.last_step is None else max(0, self.last_step - step)

    def idle_in(self, step: int) -> int | None:
        return self.due_in(step)

    def _stop_if_reached(self, session: Session) -> None:
        if self.last_step is not None and session.global_step >= self.last_step:
            session.request_stop("StopAtStep")


class NanTensor(Hook):
    """Ends the run when the training loss is NaN or infinite.

    It checks every run before anything is saved, so that no checkpoint holds the consequences.

    Args:
        fail_on_nan_loss: raise an error; if false, stop without an error, and save no further checkpoint.

    Raises:
        NonFiniteError: from `after_run`; names the step and the last good checkpoint.
    """

    def __init__(self, fail_on_nan_loss: bool = True) -> None:
        self._fail = fail_on_nan_loss

    def after_run(self, context: RunContext, values: RunValues) -> None:
        loss, session = values.totals.loss, context.session
        if math.isfinite(loss):
            return
        if not self._fail:
            session.stop_diverged("NanTensor")
            return
        raise NonFiniteError(
            f"NanTensor: the loss became {loss} between step {context.global_step} and {values.global_step}\n"
            f"  last good checkpoint, which is kept: {session.checkpoints.newest() or 'none was saved'}\n"
            "  a smaller optimizer.learning_rate or optimizer.clipnorm may help"
        )
