"""`SaveState`: which step of a session has a checkpoint, and which one is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdist.errors import CheckpointError, ClusterError
from kdist.model.names import GLOBAL_STEP
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.storage.folder import Folder
from kdist.storage.lock import check_not_taken_over

if TYPE_CHECKING:
    from kdist.run.checkpoint import Checkpoints
    from kdist.strategies.base import Values


@dataclass(frozen=True)
class _Begun:
    """A checkpoint that is to be written.

    Attributes:
        step: of its values.
        values: what is saved.
        since: what it follows if it is a delta.
        ends: what a delta that follows it has to know; None if there can be none.
        written: raises what was wrong.
    """

    step: int
    values: Values
    since: DeltaBase | None
    ends: DeltaBase | None
    written: Future[None] = field(default_factory=Future)


class SaveState:
    """Saves the present step, at once or in the background, and knows what is saved.

    Args:
        checkpoints: where checkpoints go.
        has_saved: called with the step and the path of each complete checkpoint, and whether it is a delta.

    Attributes:
        newest: the step of the newest complete checkpoint that this session has saved or restored.
        diverged: whether the parameters are worthless, so that there is nothing to save.
    """

    def __init__(self, checkpoints: Checkpoints, has_saved: Callable[[int, Path, bool], None]) -> None:
        self.newest: int | None = None
        self.diverged = False
        self._checkpoints = checkpoints
        self._has_saved = has_saved
        self._begun: _Begun | None = None
        #: What the next delta would follow; None if the next checkpoint has to be a full one.
        self._since: DeltaBase | None = None
        #: How many deltas came after the full checkpoint.
        self._num_deltas = 0

    def is_saved(self, values: Values, *, in_full: bool = False) -> bool:
        """Whether there is nothing to save, also if a delta of the present step would not do."""
        has_step = self.newest == values.global_step() and not (in_full and self._num_deltas)
        return self.diverged or has_step

    def write(self, values: Values, *, keep: int, full_every: int = 1) -> None:
        """Saves the present step, unless it is saved.

        Args:
            full_every: every so many checkpoints one is full, and the others are deltas.
        """
        self.finish(keep=keep)
        if not self.is_saved(values, in_full=full_every == 1):
            begun = self._begin(values, full_every)
            self._complete(begun, self._checkpoints.write(begun.step, values, keep=keep, since=begun.since))

    def begin(self, values: Values, *, full_every: int = 1) -> None:
        """Copies the values of the present step; they are written while training continues."""
        self.finish(keep=None)
        begun = self._begin(values, full_every)
        written = self._checkpoints.begin_save(begun.step, values, since=begun.since)
        self._begun = replace(begun, written=written)

    def finish(self, *, keep: int | None, wait: bool = True) -> bool:
        """Completes the checkpoint that is being written, once it is; returns whether it is complete now.

        Args:
            keep: how many full checkpoints to keep; all of them if None.
            wait: whether to wait for it.
        """
        if self._begun is None or not (wait or self._begun.written.done()):
            return False
        begun, self._begun = self._begun, None
        wait_for_it = partial(begun.values.wait_for, begun.written)
        self._complete(begun, self._checkpoints.finish_save(begun.step, wait_for_it, keep=keep, since=begun.since))
        return True

    def restored(self, step: int | None) -> None:
        """The values are those of a checkpoint of a step; None: of no step. The next one has to be a full one."""
        self.newest, self._since, self._num_deltas = step, None, 0

    def written(self, names: Iterable[str], values: Values) -> None:
        """Values were set; if they are of tables, the next checkpoint has to be a full one."""
        if any(name in values.by_rows for name in names):
            self._since = None
            if self._begun is not None:
                self._begun = replace(self._begun, ends=None)

    def restore_values(self, values: Values, others: Checkpoints) -> None:
        """Gives the present step the values of the newest of other checkpoints; it has to be saved again."""
        self.finish(keep=None)
        step = values.global_step()
        self.restored(None)
        if others.restore(values) is None:
            raise CheckpointError(f"there is no checkpoint in {others.place}, where the values were")
        values.write({GLOBAL_STEP: np.array(step, np.int64)})

    def settle(self, *, cluster_is_there: bool) -> None:
        """Completes the checkpoint that is being written if the cluster can still do it; otherwise it is lost."""
        with suppress(CheckpointError, ClusterError):
            self.finish(keep=None, wait=cluster_is_there)
        self._begun = None

    def _begin(self, values: Values, full_every: int) -> _Begun:
        check_not_taken_over(Folder(self._checkpoints.folder.parent))
        # Reading the servers waits for steps in flight; there may be more than the hooks have seen.
        step = values.global_step()
        # If a full one fails, the next one has to be full, too: servers forget what they have evicted.
        self._since = self._since if self._num_deltas + 1 < full_every else None
        ended = values.next_interval(None if self._since is None else self._since.interval)
        return _Begun(step, values, self._since, None if ended is None else DeltaBase(step, ended))

    def _complete(self, begun: _Begun, path: Path) -> None:
        is_delta = begun.since is not None
        self.newest, self._since = begun.step, begun.ends
        self._num_deltas = self._num_deltas + 1 if is_delta else 0
        self._has_saved(begun.step, path, is_delta)
