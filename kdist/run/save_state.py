"""`SaveState`: the step of a session that is saved, and the one that is being saved."""

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

if TYPE_CHECKING:
    from kdist.run.checkpoint import Checkpoints
    from kdist.strategies.base import Values


@dataclass(frozen=True)
class _PendingSave:
    """A checkpoint that was begun.

    Attributes:
        since: the checkpoint or delta that it follows, if it is a delta.
        ends: the base of a delta that follows it; None if there can be none.
        written: raises the errors of writing.
    """

    step: int
    values: Values
    since: DeltaBase | None
    ends: DeltaBase | None
    written: Future[None] = field(default_factory=Future)


class SaveState:
    """Saves the present step, at once or in the background, and remembers the saved one.

    `has_saved` is called with the step and the path of each complete checkpoint, and whether it is a delta.

    Attributes:
        newest: the step of the newest complete checkpoint that this session has saved or restored.
        diverged: True if the parameters are worthless, so that there is nothing to save.
    """

    def __init__(self, checkpoints: Checkpoints, has_saved: Callable[[int, Path, bool], None]) -> None:
        self.newest: int | None = None
        self.diverged = False
        self._checkpoints = checkpoints
        self._has_saved = has_saved
        self._begun: _PendingSave | None = None
        #: The base of the next delta; None if the next checkpoint has to be a full one.
        self._since: DeltaBase | None = None
        #: The number of deltas after the full checkpoint.
        self._num_deltas = 0

    def is_saved(self, values: Values, *, in_full: bool = False) -> bool:
        """True if the present step is saved, or worthless; with `in_full`, a delta does not count."""
        has_step = self.newest == values.global_step() and not (in_full and self._num_deltas)
        return self.diverged or has_step

    def write(self, values: Values, *, keep: int, full_every: int = 1) -> None:
        """Saves the present step, unless it is saved; of `full_every` checkpoints, one is full, the others deltas."""
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
        """Completes a begun checkpoint once it is written; returns whether it has. If `keep` is None, all are kept."""
        if self._begun is None or not (wait or self._begun.written.done()):
            return False
        begun, self._begun = self._begun, None
        wait_for_it = partial(begun.values.wait_for, begun.written)
        self._complete(begun, self._checkpoints.finish_save(begun.step, wait_for_it, keep=keep, since=begun.since))
        return True

    def note_restore(self, step: int | None) -> None:
        """Notes that a saved step was restored; None: values of no saved step. The next checkpoint is a full one."""
        self.newest, self._since, self._num_deltas = step, None, 0

    def note_write(self, names: Iterable[str], values: Values) -> None:
        """Notes that values were set; if they are of tables, the next checkpoint is a full one."""
        if any(name in values.by_rows for name in names):
            self._since = None
            if self._begun is not None:
                self._begun = replace(self._begun, ends=None)

    def note_move(self) -> None:
        """Notes that other servers have the values, and know of no save: the next checkpoint is a full one."""
        self._since = None

    def restore_values(self, values: Values, others: Checkpoints) -> None:
        """Gives the present step the values of the newest of other checkpoints; it counts as not saved."""
        self.finish(keep=None)
        step = values.global_step()
        self.note_restore(None)
        if others.restore(values) is None:
            raise CheckpointError(f"no checkpoint left in {others.place} to restore from")
        values.write({GLOBAL_STEP: np.array(step, np.int64)})

    def settle(self, *, cluster_is_there: bool) -> None:
        """Completes the checkpoint that is being written if the cluster can still do it; otherwise it is lost."""
        with suppress(CheckpointError, ClusterError):
            self.finish(keep=None, wait=cluster_is_there)
        self._begun = None

    def _begin(self, values: Values, full_every: int) -> _PendingSave:
        # Reading the servers waits for steps in flight; there may be more than the hooks have seen.
        step = values.global_step()
        # If a full one fails, the next one has to be full, too: servers forget what they have evicted.
        self._since = self._since if self._num_deltas + 1 < full_every else None
        ended = values.next_interval(None if self._since is None else self._since.interval)
        return _PendingSave(step, values, self._since, None if ended is None else DeltaBase(step, ended))

    def _complete(self, begun: _PendingSave, path: Path) -> None:
        is_delta = begun.since is not None
        self.newest, self._since = begun.step, begun.ends
        self._num_deltas = self._num_deltas + 1 if is_delta else 0
        self._has_saved(begun.step, path, is_delta)
