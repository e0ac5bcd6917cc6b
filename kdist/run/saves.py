"""`Saves`: which step of a session has a checkpoint, and which one is being written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdist.errors import CheckpointError, ClusterError
from kdist.model.names import GLOBAL_STEP
from kdist.run.run_lock import check_not_taken_over

if TYPE_CHECKING:
    from kdist.run.checkpoint import Checkpoints
    from kdist.strategies.base import Strategy


class Saves:
    """Saves the present step, at once or in the background, and knows what is saved.

    Args:
        checkpoints: where checkpoints go.
        has_saved: called with the step and the path of each complete checkpoint.

    Attributes:
        newest: the step of the newest complete checkpoint that this session has saved or restored.
        diverged: whether the parameters are worthless, so that there is nothing to save.
    """

    def __init__(self, checkpoints: Checkpoints, has_saved: Callable[[int, Path], None]) -> None:
        self.newest: int | None = None
        self.diverged = False
        self._checkpoints = checkpoints
        self._has_saved = has_saved
        self._begun: tuple[int, Future[None]] | None = None

    def is_saved(self, strategy: Strategy) -> bool:
        """Whether there is nothing to save."""
        return self.diverged or self.newest == strategy.global_step()

    def save(self, strategy: Strategy, *, keep: int) -> None:
        """Saves the present step, unless it is saved."""
        self.finish(strategy, keep=keep)
        if not self.is_saved(strategy):
            step = self._step_of(strategy)
            self._complete(step, self._checkpoints.save(step, strategy, keep=keep))

    def begin(self, strategy: Strategy) -> None:
        """Copies the values of the present step; they are written while training continues."""
        self.finish(strategy, keep=None)
        step = self._step_of(strategy)
        self._begun = step, self._checkpoints.begin_save(step, strategy)

    def finish(self, strategy: Strategy, *, keep: int | None, wait: bool = True) -> bool:
        """Completes the checkpoint that is being written, once it is; returns whether it is complete now.

        Args:
            keep: how many checkpoints to keep; all of them if None.
            wait: whether to wait for it.
        """
        if self._begun is None or not (wait or self._begun[1].done()):
            return False
        (step, written), self._begun = self._begun, None
        wait_for_it = partial(strategy.wait_for, written)
        self._complete(step, self._checkpoints.finish_save(step, wait_for_it, keep=keep))
        return True

    def restore_values(self, strategy: Strategy, others: Checkpoints) -> None:
        """Gives the present step the values of the newest of other checkpoints; it has to be saved again."""
        self.finish(strategy, keep=None)
        step, self.newest = strategy.global_step(), None
        if others.restore(strategy) is None:
            raise CheckpointError(f"there is no checkpoint in {others.place}, where the values were")
        strategy.write({GLOBAL_STEP: np.array(step, np.int64)})

    def settle(self, strategy: Strategy, *, cluster_is_there: bool) -> None:
        """Completes the checkpoint that is being written if the cluster can still do it; otherwise it is lost."""
        with suppress(CheckpointError, ClusterError):
            self.finish(strategy, keep=None, wait=cluster_is_there)
        self._begun = None

    def _step_of(self, strategy: Strategy) -> int:
        check_not_taken_over(self._checkpoints.folder.parent)
        # Reading the servers waits for steps in flight; there may be more than the hooks have seen.
        return strategy.global_step()

    def _complete(self, step: int, path: Path) -> None:
        self.newest = step
        self._has_saved(step, path)
