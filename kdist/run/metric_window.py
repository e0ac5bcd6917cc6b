"""`MetricWindow`: loss and metrics over the last examples, from the sums that steps return."""

from __future__ import annotations

import operator
from collections import deque
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kdist.model.metrics import MetricRows, MetricTotals

_NUM_PARTS = 20


@dataclass(frozen=True)
class _Part:
    """Consecutive steps: which part they are, how many examples they had, and the sums of their metrics."""

    number: int
    num_examples: int
    totals: MetricTotals

    def __add__(self, later: _Part) -> _Part:
        return _Part(self.number, self.num_examples + later.num_examples, self.totals + later.totals)


class MetricWindow:
    """The metrics of the newest steps, summed in parts, of which the oldest is dropped as a whole.

    The window covers at most `size` examples and, once there were so many, at least 95 % of them less those of a step.
    A step with more examples than that is a window of its own.

    Args:
        size: examples; at least 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_seen = 0
        self._parts: deque[_Part] = deque()

    def add(self, num_examples: np.ndarray, metrics: MetricRows) -> None:
        """Adds steps.

        Args:
            num_examples: int array `[num_steps]`.
            metrics: of the same steps.
        """
        ends = self._num_seen + np.cumsum(num_examples)
        numbers = (ends - num_examples) * _NUM_PARTS // self._size
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for first, last in zip(firsts, [*firsts[1:], len(numbers)]):
            part = _Part(int(numbers[first]), int(num_examples[first:last].sum()), metrics[first:last].total())
            is_new = not self._parts or self._parts[-1].number != part.number
            self._parts.append(part if is_new else self._parts.pop() + part)
        self._num_seen += int(num_examples.sum())
        while len(self._parts) > 1 and self.num_examples > self._size:
            self._parts.popleft()

    @property
    def num_examples(self) -> int:
        """How many examples it covers."""
        return sum(part.num_examples for part in self._parts)

    @property
    def totals(self) -> MetricTotals | None:
        """Their loss and metrics; None without any."""
        return reduce(operator.add, self._parts).totals if self._parts else None
