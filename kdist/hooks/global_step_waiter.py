"""`GlobalStepWaiter`: workers that start one after the other. After `tf.compat.v1.train.GlobalStepWaiterHook`."""

from __future__ import annotations

from kdist.config.checks import check_whole_number
from kdist.hooks.base import Hook, RunContext, RunValues, Session


class GlobalStepWaiter(Hook):
    """Lets worker `i` start at global step `i * wait_until_step`, so that the first steps disturb each other less.

    In TF1, each worker has its own hook that polls the global step; here, the chief gives no calls to waiting
    workers. For asynchronous training.

    Args:
        wait_until_step: steps between the starts of two workers; at least 1.

    Raises:
        ConfigError: from `after_create_session`: the strategy needs all workers for every step.
    """

    def __init__(self, wait_until_step: int) -> None:
        check_whole_number("GlobalStepWaiter.wait_until_step", wait_until_step)
        self._every = wait_until_step
        self._num_workers = 1

    def after_create_session(self, session: Session) -> None:
        self._num_workers = session.strategy.num_replicas
        self._set_active(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        # A run may pass such a step, if steps were repeated.
        if values.global_step // self._every > (values.global_step - values.num_steps) // self._every:
            self._set_active(context.session)

    def due_in(self, step: int) -> int | None:
        all_work = step // self._every >= self._num_workers - 1
        return None if all_work else self._every - step % self._every

    def _set_active(self, session: Session) -> None:
        session.strategy.set_active(range(min(self._num_workers, session.global_step // self._every + 1)))
