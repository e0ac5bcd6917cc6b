"""The intervals between saves, by which a delta has only the rows of tables that have changed since a save.

Time is cut into intervals by saves. Every server has the number of the present one, and marks a row that changes with
it; a delta has the rows with the mark of a later interval than that of the checkpoint which it follows. So nothing has
to be cleared, and what a failed save did not write stays marked.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaBase:
    """The checkpoint that a delta follows.

    Attributes:
        step: its global step.
        interval: ended by it.
    """

    step: int
    interval: int
