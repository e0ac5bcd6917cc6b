"""Metrics that are refused: those that do not add up, and not those that draw."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._compat.keras import global_seed
from kdist.model.forward import SeededScope
from kdist.model.metrics import check_metrics

SPEC = (tf.TensorSpec([None, 5], tf.int32), tf.TensorSpec([None, 5], tf.float32))


class TopGrade(keras.metrics.Mean):
    """The label of the item with the highest score; of several that tie, one is drawn."""

    def __init__(self, name: str = "top_grade") -> None:
        super().__init__(name=name)
        self.draws = keras.random.SeedGenerator(3)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        top = keras.ops.argmax(y_pred + self.draw(keras.ops.shape(y_pred)), axis=1)
        super().update_state(keras.ops.take_along_axis(y_true, top[:, None], axis=1))

    def draw(self, shape: Any) -> Any:
        return keras.random.uniform(shape, maxval=1e-5, seed=self.draws)


class DrawsByTensorFlow(TopGrade):
    def draw(self, shape: Any) -> Any:
        return tf.random.uniform(shape, maxval=1e-5)


class Newest(TopGrade):
    """Draws, and does not add up either."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.reset_state()
        super().update_state(y_true, y_pred)


def ranking(metric: keras.metrics.Metric) -> keras.Model:
    layers = [keras.layers.Input((5,), dtype="int32"), keras.layers.Embedding(90, 1), keras.layers.Flatten()]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=[metric])
    model.fit(np.zeros((2, 5), "int32"), np.zeros((2, 5), "float32"), verbose=0)
    return model


@pytest.mark.parametrize("metric", [TopGrade, DrawsByTensorFlow])
def test_a_metric_that_breaks_ties_at_random_adds_up(metric: type[TopGrade]) -> None:
    check_metrics(ranking(metric()), SPEC)


def test_a_metric_that_draws_and_does_not_add_up_is_refused() -> None:
    with pytest.raises(kdist.ConfigError, match="metric top_grade: Newest does not add up"):
        check_metrics(ranking(Newest()), SPEC)


def test_each_generator_of_a_step_draws_other_numbers_from_its_seed() -> None:
    generators = [keras.random.SeedGenerator(1), keras.random.SeedGenerator(1)]

    @tf.function(autograph=False)
    def step(seed: tf.Tensor) -> list[Any]:
        with SeededScope([(global_seed(), seed)]):
            return [keras.random.uniform([], seed=g) for g in (*generators, generators[0], None)]

    seeds = [tf.constant(s, global_seed().dtype) for s in ([7, 1], [8, 1], [7, 1])]
    one, other, again = ([float(v) for v in step(seed)] for seed in seeds)
    assert len({*one, *other}) == 8
    assert one == again
    # Nothing of this process is read.
    assert not step.get_concrete_function(seeds[0]).variables
