"""`NanTensor`: stops on a NaN or infinite loss. After `tf.compat.v1.train.NanTensorHook`."""

from __future__ import annotations

import math

from kdist.errors import NonFiniteError
from kdist.hooks.base import Hook, RunContext, RunValues


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
