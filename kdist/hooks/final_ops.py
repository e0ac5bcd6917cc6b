"""`FinalOps`: what to know of the final values. After `tf.compat.v1.train.FinalOpsHook`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kdist.hooks.base import Hook

if TYPE_CHECKING:
    from kdist.session import TrainSession


class FinalOps(Hook):
    """Calls a function at a clean end, while the tasks are still there.

    Args:
        final_ops: `session -> anything`; `session.read()` has the values that training has come to.

    Attributes:
        final_ops_values: what it returned; None before.
    """

    def __init__(self, final_ops: Callable[[TrainSession], Any]) -> None:
        self._final_ops = final_ops
        self.final_ops_values: Any = None

    def begin(self, session: TrainSession) -> None:
        self.final_ops_values = None

    def end(self, session: TrainSession) -> None:
        self.final_ops_values = self._final_ops(session)
