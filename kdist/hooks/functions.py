"""Hooks that call a function of the user. After `FeedFnHook` and `FinalOpsHook` of `tf.compat.v1.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kdist.config.checks import check_whole_number
from kdist.hooks.base import Hook, RunContext, Session


class FeedFn(Hook):
    """Sets values before steps run; a placeholder of TF1 is a non-trainable variable of the model here.

    Args:
        feed_fn: `global step -> {name: value}`, with the names and shapes of a checkpoint, such as
            `state/gate/temperature`; `learning_rate` belongs to the optimizer.
        every_steps: steps between calls of `feed_fn`; 1, as in TF1, costs a call of the chief for each step.

    Raises:
        ConfigError: from `before_run`: there is no such value, or it has another shape.
    """

    def __init__(self, feed_fn: Callable[[int], Mapping[str, Any]], every_steps: int = 1) -> None:
        check_whole_number("FeedFn.every_steps", every_steps)
        self._feed_fn = feed_fn
        self._every_steps = every_steps
        self._next_step = 0

    def after_create_session(self, session: Session) -> None:
        self._next_step = session.global_step

    def before_run(self, context: RunContext) -> None:
        if context.global_step >= self._next_step:
            context.session.write(self._feed_fn(context.global_step))
            self._next_step = context.global_step + self._every_steps

    def due_in(self, step: int) -> int | None:
        # Also called before `before_run`: then it acts at once, and again after `every_steps`.
        return self._next_step - step if self._next_step > step else self._every_steps

    def idle_in(self, step: int) -> int | None:
        return self.due_in(step)


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
