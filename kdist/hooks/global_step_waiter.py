"""`GlobalStepWaiter`: workers that begin one after the other. After `tf.compat.v1.train.GlobalStepWaiterHook`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdist.checks import check_whole_number
from kdist.hooks.base import Hook, RunContext, RunValues

if TYPE_CHECKING:
    from kdist.session import TrainSession


class GlobalStepWaiter(Hook):
    """Lets worker `i` begin at global step `i * wait_until_step`, so that first steps disturb each other less.

    In TF1 each worker has a hook of its own and looks at the global step again and again; here the chief gives workers
    that are to wait no calls. For asynchronous training.

    Args:
        wait_until_step: steps between the beginnings of two workers; at least 1.

    Raises:
        ConfigError: from `after_create_session`: the strategy needs all workers for every step.
    """

    def __init__(self, wait_until_step: int) -> None:
        check_whole_number("GlobalStepWaiter.wait_until_step", wait_until_step)
        self._every = wait_until_step
        self._num_workers = 1

    def after_create_session(self, session: TrainSession) -> None:
        self._num_workers = session.strategy.num_replicas
        self._employ(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        # One run may pass a beginning, if steps were done twice.
        if values.global_step // self._every > (values.global_step - values.num_steps) // self._every:
            self._employ(context.session)

    def due_in(self, step: int) -> int | None:
        return None if self._all_work_at(step) else self._every - step % self._every

    def idle_in(self, step: int) -> int | None:
        # Calls that are in flight may go on: whoever begins takes the next one.
        return None

    def _all_work_at(self, step: int) -> bool:
        return step // self._every >= self._num_workers - 1

    def _employ(self, session: TrainSession) -> None:
        session.strategy.employ(range(min(self._num_workers, session.global_step // self._every + 1)))
