"""The best value of each validation metric."""

import math

import keras
import models
from helpers import toy_data

from kdist.run.best_values import Best, BestValues, is_better, mode_of


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
        "loss": Best(0.4, 20, "min"),
        "accuracy": Best(0.9, 30, "max"),
        # Of one that nobody can judge it is the last.
        "odd": Best(2.0, 30, None),
    }


def test_a_resumed_run_keeps_those_of_the_steps_before() -> None:
    first = BestValues(fitted())
    first.add(10, {"loss": 0.2})
    first.add(30, {"loss": 0.1, "accuracy": 0.9})
    resumed = BestValues(fitted(), first.as_dict())
    resumed.forget_after(30)
    assert resumed.by_name == first.by_name
    # Step 30 will be done again.
    resumed.forget_after(20)
    assert resumed.by_name == {}


def test_any_number_is_better_than_none() -> None:
    assert is_better(9.0, math.nan, "min")
    assert not is_better(math.nan, 9.0, "max")
    assert mode_of(fitted(), "head_loss") == "min"
