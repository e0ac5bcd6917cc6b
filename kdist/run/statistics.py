"""Figures of a session: exact counts and steady rates of its runs, metrics of the last examples, best values."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.run.result import Gradients
from kdist.strategies.gradient_counts import GradientCounts, add_counts

if TYPE_CHECKING:
    import keras

    from kdist.model.metrics import MetricRows, MetricTotals
    from kdist.strategies.call_logs import StepLogs

_NUM_PARTS = 20


@dataclass(frozen=True)
class RunValues:
    """The outcome of one run of a session.

    Attributes:
        global_step: updates applied after it.
        num_steps: updates that it added.
        seconds: its duration, to which the steps of a call contribute alike, whichever runs they are of.
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
        """The number of examples in its updates."""
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
        totals: dict[int, GradientCounts] = {}
        return reduce(add_counts, self.steps.gradient_counts, totals)


class RunStatistics:
    """Adds up runs of a session: all of them for its result, or some for a report.

    `extra_steps` are updates beyond those requested, from calls that were repeated after the loss of a worker.
    """

    def __init__(self) -> None:
        self.applied = self.extra_steps = self.num_examples = 0
        self._gradient_counts: dict[int, GradientCounts] = {}
        self._staleness_sum = self._staleness_max = 0
        self._steady_steps = self._steady_examples = 0
        self._steady_seconds = 0.0

    def add(self, values: RunValues, extra_steps: int = 0) -> None:
        self.applied += values.num_steps
        self.extra_steps += extra_steps
        self.num_examples += values.num_examples
        add_counts(self._gradient_counts, values.gradient_counts)
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
            by_worker={f"worker:{worker}": counts for worker, counts in sorted(self._gradient_counts.items())},
        )

    @property
    def steps_per_second(self) -> float | None:
        """The rate of the runs in which nothing was traced; None without such a run."""
        return self._steady_steps / self._steady_seconds if self._steady_seconds else None

    @property
    def examples_per_second(self) -> float | None:
        return self._steady_examples / self._steady_seconds if self._steady_seconds else None


class MetricWindow:
    """The metrics of the newest steps, summed in parts, of which the oldest is dropped as a whole.

    The window covers at most `size` examples, at least 1, and, once there were so many, at least 95 % of them less one
    step. A step with more examples than that is a window of its own.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_seen = 0
        #: Consecutive steps: the number of the part, the number of examples, and the sums of the metrics.
        self._parts: deque[tuple[int, int, MetricTotals]] = deque()

    def add(self, num_examples: np.ndarray, metrics: MetricRows) -> None:
        """Adds the metrics of steps, with their numbers of examples: int array `[num_steps]`."""
        ends = self._num_seen + np.cumsum(num_examples)
        numbers = (ends - num_examples) * _NUM_PARTS // self._size
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for first, last in zip(firsts, [*firsts[1:], len(numbers)]):
            number, count = int(numbers[first]), int(num_examples[first:last].sum())
            totals = metrics[first:last].total()
            if self._parts and self._parts[-1][0] == number:
                _, earlier_count, earlier = self._parts.pop()
                count, totals = earlier_count + count, earlier + totals
            self._parts.append((number, count, totals))
        self._num_seen += int(num_examples.sum())
        while len(self._parts) > 1 and self.num_examples > self._size:
            self._parts.popleft()

    @property
    def num_examples(self) -> int:
        return sum(count for _, count, _ in self._parts)

    @property
    def totals(self) -> MetricTotals | None:
        return reduce(operator.add, (totals for _, _, totals in self._parts)) if self._parts else None


class BestValues:
    """Keeps the best value of each metric, beginning with those of the run that is resumed.

    `by_name` has the best `value` of each, its global `step`, and `mode`, `min` or `max`, as in `result.json`. If the
    mode is not known, it is None, and the value is the last one.
    """

    def __init__(self, model: keras.Model, earlier: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._model = model
        self.by_name = {name: dict(best) for name, best in (earlier or {}).items() if best["value"] is not None}

    def forget_after(self, step: int) -> None:
        """Forgets the values of steps after `step`, where the run is resumed: they will be repeated."""
        self.by_name = {name: best for name, best in self.by_name.items() if best["step"] <= step}

    def add(self, step: int, logs: Mapping[str, Any]) -> None:
        """Adds the validation values of a step, by name; an array has no best value."""
        for name, value in logs.items():
            if isinstance(value, np.ndarray):
                continue
            mode, best = mode_of(self._model, name), self.by_name.get(name)
            if best is None or mode is None or is_better(value, best["value"], mode):
                self.by_name[name] = {"value": value, "step": step, "mode": mode}


def is_better(value: float, than: float, mode: str) -> bool:
    """True if a value is better than another one; any number is better than NaN."""
    if math.isnan(value) or math.isnan(than):
        return math.isnan(than) and not math.isnan(value)
    return value > than if mode == "max" else value < than


def mode_of(model: keras.Model, name: str) -> str | None:
    """The better values of a metric, `min` or `max`; None if neither Keras nor the metric tells."""
    # Not above: hooks, which --help lists, import this module, and need no Keras for it.
    from kdist._compat.keras import better_is

    if name == "loss" or name.endswith("_loss"):
        return "min"
    for metric in getattr(model, "metrics", []):
        for each in getattr(metric, "metrics", None) or [metric]:
            if each.name == name and (direction := better_is(each)) is not None:
                return "max" if direction == "up" else "min"
    return None
