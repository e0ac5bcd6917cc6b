"""`Account`: what a session did, counted run by run."""

from __future__ import annotations

from kdist.hooks.base import RunValues
from kdist.result import Contributions, Gradients, add_contributions


class Account:
    """What a session did, exactly, for its result.

    Attributes:
        applied: updates applied.
        extra_steps: of those, updates beyond what was asked for, from calls that ran again after a loss.
        num_examples: examples seen.
    """

    def __init__(self) -> None:
        self.applied = 0
        self.extra_steps = 0
        self.num_examples = 0
        self._contributions: dict[int, Contributions] = {}
        self._staleness_sum = 0
        self._staleness_max = 0
        self._steady_steps = 0
        self._steady_examples = 0
        self._steady_seconds = 0.0

    def add(self, values: RunValues, extra_steps: int) -> None:
        self.applied += values.num_steps
        self.extra_steps += extra_steps
        self.num_examples += values.num_examples
        self._contributions = add_contributions(self._contributions, values.contributions)
        self._staleness_sum += int(values.staleness.sum())
        self._staleness_max = max(self._staleness_max, int(values.staleness.max(initial=0)))
        if not values.warming_up:
            self._steady_steps += values.num_steps
            self._steady_examples += values.num_examples
            self._steady_seconds += values.seconds

    @property
    def gradients(self) -> Gradients:
        """What became of the gradients."""
        staleness_mean = self._staleness_sum / self.applied if self.applied else 0.0
        return Gradients(
            applied=self.applied,
            dropped=sum(counts.dropped for counts in self._contributions.values()),
            staleness_mean=staleness_mean,
            staleness_max=self._staleness_max,
            by_worker={f"worker:{worker}": counts for worker, counts in self._contributions.items()},
        )

    @property
    def steps_per_second(self) -> float | None:
        """Over the runs in which nothing was traced; None if there was none."""
        return self._steady_steps / self._steady_seconds if self._steady_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        """Over the runs in which nothing was traced; None if there was none."""
        return self._steady_examples / self._steady_seconds if self._steady_seconds else None
