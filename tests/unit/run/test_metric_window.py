"""Metrics over the last examples."""

from typing import Any

import numpy as np
import pytest
from fakes import FakeTotals

from kdist.run.metric_window import MetricWindow


def added(window: MetricWindow, sizes: list[int], runs: list[int]) -> MetricWindow:
    """The window after steps of these sizes, whose losses are their numbers, in runs of these lengths."""
    first = 0
    for length in runs:
        numbers = range(first, first + length)
        rows: Any = FakeTotals(tuple(float(number) for number in numbers))
        window.add(np.array(sizes[first : first + length]), rows)
        first += length
    return window


def covered(window: MetricWindow) -> list[float]:
    totals: Any = window.totals
    return list(totals.losses)


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_it_covers_the_last_examples_less_a_twentieth_and_a_step(size: int) -> None:
    sizes = np.random.default_rng(3).integers(1, 12, 300).tolist()
    for number in range(1, 300):
        window = added(MetricWindow(size), sizes, [number])
        steps = covered(window)
        # The newest ones, without a gap.
        assert steps == [*range(number - len(steps), number)]
        assert window.num_examples == sum(sizes[int(step)] for step in steps)
        assert window.num_examples <= size or len(steps) == 1
        assert window.num_examples >= min(0.95 * size - max(sizes), sum(sizes[:number]))


def test_it_is_the_same_however_the_steps_are_divided_into_runs() -> None:
    sizes = np.random.default_rng(4).integers(1, 12, 120).tolist()
    at_once = added(MetricWindow(200), sizes, [120])
    one_by_one = added(MetricWindow(200), sizes, [1] * 120)
    in_runs = added(MetricWindow(200), sizes, [50, 3, 64, 3])
    assert covered(at_once) == covered(one_by_one) == covered(in_runs)


def test_a_step_with_more_examples_is_a_window_of_its_own() -> None:
    window = added(MetricWindow(10), [64, 64, 64], [3])
    assert (covered(window), window.num_examples) == ([2.0], 64)


def test_without_steps_there_is_nothing() -> None:
    window = MetricWindow(10)
    assert window.totals is None
    assert window.num_examples == 0
