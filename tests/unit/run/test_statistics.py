"""The best value of each validation metric, and metrics over the last examples."""

import math
from typing import Any

import keras
import models
import numpy as np
import pytest
from fakes import FakeTotals
from helpers import toy_data

from kdist.run.statistics import BestValues, MetricWindow, is_better, mode_of


def fitted() -> keras.Model:
    model = models.mlp(metrics=["accuracy", keras.metrics.MeanMetricWrapper(lambda y, p: y, name="odd")])
    model.evaluate(*toy_data(8), verbose=0)
    return model


def test_each_metric_has_its_best_step() -> None:
    best = BestValues(fitted())
    best.add(10, {"loss": 0.5, "accuracy": 0.7, "odd": 3.0})
    best.add(20, {"loss": 0.4, "accuracy": 0.6, "odd": 1.0})
    best.add(30, {"loss": math.nan, "accuracy": 0.9, "odd": 2.0})
    assert best.by_name == {
        "loss": {"value": 0.4, "step": 20, "mode": "min"},
        "accuracy": {"value": 0.9, "step": 30, "mode": "max"},
        # Of one that nobody can judge it is the last.
        "odd": {"value": 2.0, "step": 30, "mode": None},
    }


def test_a_resumed_run_keeps_those_of_the_steps_before() -> None:
    first = BestValues(fitted())
    first.add(10, {"loss": 0.2})
    first.add(30, {"loss": 0.1, "accuracy": 0.9})
    resumed = BestValues(fitted(), first.by_name)
    resumed.forget_after(30)
    assert resumed.by_name == first.by_name
    # Step 30 will be done again.
    resumed.forget_after(20)
    assert resumed.by_name == {}


def test_any_number_is_better_than_none() -> None:
    assert is_better(9.0, math.nan, "min")
    assert not is_better(math.nan, 9.0, "max")
    assert mode_of(fitted(), "head_loss") == "min"


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
