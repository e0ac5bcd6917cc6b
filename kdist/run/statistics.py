"""What the runs of a session add up to: exact counts of steps, examples and gradients, and steady rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np

from kdist.run.result import Gradients
from kdist.strategies.gradient_counts import GradientCounts, add_counts

if TYPE_CHECKING:
    from kdist.model.metrics import MetricTotals
    from kdist.strategies.calls import StepLogs


@dataclass(frozen=True)
class RunValues:
    """The outcome of one run of a session.

    Attributes:
        global_step: updates applied after it.
        num_steps: updates that it added.
        seconds: its duration.
        warming_up: True if functions were traced during the run, so that `seconds` says nothing about speed.
        steps: the reports of its steps, in the order in which they finished.
    """

    global_step: int
    num_steps: int
    seconds: float
    warming_up: bool
    steps: StepLogs

    @cached_property
    def num_examples(self) -> int:
        """Examples in its updates."""
        return int(self.steps.num_examples.sum())

    @cached_property
    def totals(self) -> MetricTotals:
        """Loss and metrics over its steps; `totals.logs` are their values, and totals of several runs add up."""
        return self.steps.metrics.total()

    @property
    def staleness(self) -> np.ndarray:
        """The number of other updates between pull and push of each update: int array `[num_steps]`."""
        return self.steps.staleness

    @cached_property
    def gradient_counts(self) -> Mapping[int, GradientCounts]:
        """The fate of each worker's gradients, by worker index; empty without workers."""
        return reduce(add_counts, self.steps.gradient_counts, {})


class RunStatistics:
    """Adds up the runs of a session for its result.

    Attributes:
        applied: updates applied.
        extra_steps: updates beyond those requested, from calls that were repeated after the loss of a worker.
        num_examples: examples seen.
    """

    def __init__(self) -> None:
        self.applied = 0
        self.extra_steps = 0
        self.num_examples = 0
        self._gradient_counts: dict[int, GradientCounts] = {}
        self._staleness_sum = 0
        self._staleness_max = 0
        self._steady_steps = 0
        self._steady_examples = 0
        self._steady_seconds = 0.0

    def add(self, values: RunValues, extra_steps: int) -> None:
        """Adds one run, `extra_steps` of whose updates were not requested."""
        self.applied += values.num_steps
        self.extra_steps += extra_steps
        self.num_examples += values.num_examples
        self._gradient_counts = add_counts(self._gradient_counts, values.gradient_counts)
        self._staleness_sum += int(values.staleness.sum())
        self._staleness_max = max(self._staleness_max, int(values.staleness.max(initial=0)))
        if not values.warming_up:
            self._steady_steps += values.num_steps
            self._steady_examples += values.num_examples
            self._steady_seconds += values.seconds

    @property
    def gradients(self) -> Gradients:
        return Gradients(
            applied=self.applied,
            dropped=sum(counts.dropped for counts in self._gradient_counts.values()),
            staleness_mean=self._staleness_sum / self.applied if self.applied else 0.0,
            staleness_max=self._staleness_max,
            by_worker={f"worker:{worker}": counts for worker, counts in self._gradient_counts.items()},
        )

    @property
    def steps_per_second(self) -> float | None:
        """The rate of the runs in which nothing was traced; None without such a run."""
        return self._steady_steps / self._steady_seconds if self._steady_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        """As `steps_per_second`."""
        return self._steady_examples / self._steady_seconds if self._steady_seconds else None
