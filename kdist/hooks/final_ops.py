"""`FinalOps`: a function of the final values. After `tf.compat.v1.train.FinalOpsHook`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdist.hooks.base import Hook, Session


class FinalOps(Hook):
    """Calls a function at the end of training, while the tasks still run.

    Args:
        final_ops: `session -> anything`; `session.read()` returns the final values.

    Attributes:
        final_ops_values: the result; None before.
    """

    def __init__(self, final_ops: Callable[[Session], Any]) -> None:
        self._final_ops = final_ops
        self.final_ops_values: Any = None

    def begin(self, session: Session) -> None:
        self.final_ops_values = None

    def end(self, session: Session) -> None:
        self.final_ops_values = self._final_ops(session)
