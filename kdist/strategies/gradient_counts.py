"""`GradientCounts`: accepted and dropped gradients of each worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientCounts:
    """The fate of the gradients that one worker computed.

    Attributes:
        accepted: part of an update.
        dropped: not applied, neither whole nor in part.
        stale: of the dropped ones, those whose parameters had been updated in the meantime.
    """

    accepted: int = 0
    dropped: int = 0
    stale: int = 0

    def __add__(self, other: GradientCounts) -> GradientCounts:
        return GradientCounts(self.accepted + other.accepted, self.dropped + other.dropped, self.stale + other.stale)


def add_counts(totals: dict[int, GradientCounts], more: Mapping[int, GradientCounts]) -> dict[int, GradientCounts]:
    """Adds counts of some workers, by their indices, to totals; returns the totals."""
    for worker, counts in more.items():
        totals[worker] = totals[worker] + counts if worker in totals else counts
    return totals
