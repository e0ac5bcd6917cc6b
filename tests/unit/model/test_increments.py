"""Values that a step adds to a variable, as opposed to those that it assigns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from kdist.model.step_findings import is_increment

INCREMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "counter": lambda old, x: old + 1.0,
    "sum": lambda old, x: old + x,
    "difference": lambda old, x: old - x,
    "moving average": lambda old, x: old * 0.99 + x * 0.01,
    "moving average, written as a step": lambda old, x: old - (old - x) * 0.01,
    "moving average of half floats": lambda old, x: tf.cast(tf.cast(old, "float16") * 0.9, "float32") + x,
    "factor of the caller's": lambda old, x: old + x * (x - old),
    "step towards a bound": lambda old, x: old + ops.clip(x - old, 0.0, 0.1),
    "a batch's weight": lambda old, x: old / 2 + x,
}
ASSIGNMENTS: dict[str, Callable[[Any, Any], Any]] = {
    "constant": lambda old, x: tf.ones_like(x),
    "of the batch": lambda old, x: x * 2,
    "itself, and then another": lambda old, x: old + (x - old),
    "clipped": lambda old, x: ops.clip(old + x, 0.0, 1.0),
    "queue": lambda old, x: ops.concatenate([x[:1], old[:-1]], axis=0),
    "rolled": lambda old, x: ops.roll(old, 1),
    "maximum": ops.maximum,
    "normalized": lambda old, x: old / ops.norm(old),
    "changed sign": lambda old, x: x - old,
    "doubled": lambda old, x: 2.0 * old,
    "moving average whose momentum changes": lambda old, x: old * x + x,
    "chosen": lambda old, x: ops.where(x > 0, old + 1.0, old),
    "in a branch": lambda old, x: tf.cond(x[0] > 0, lambda: old + 1.0, lambda: old),
    "set in places": lambda old, x: ops.scatter_update(old, [[0]], x[:1]),
}


def traced(new_value: Callable[[Any, Any], Any]) -> bool:
    found = []

    def step(old: tf.Tensor, x: tf.Tensor) -> None:
        found.append(is_increment(old, new_value(old, x)))

    tf.function(step, autograph=False).get_concrete_function(*[tf.TensorSpec([3])] * 2)
    return found[0]


@pytest.mark.parametrize("name", INCREMENTS)
def test_increments_add_up(name: str) -> None:
    assert traced(INCREMENTS[name])


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_other_values_do_not(name: str) -> None:
    assert not traced(ASSIGNMENTS[name])


def test_the_statistics_of_keras_layers_are_increments() -> None:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))

    def step(mean: tf.Tensor, variance: tf.Tensor, x: tf.Tensor) -> None:
        pairs = [(layer.moving_mean, mean), (layer.moving_variance, variance)]
        with keras.StatelessScope(pairs) as scope:
            layer(x, training=True)
        assert all(is_increment(old, scope.get_current_value(variable)) for variable, old in pairs)

    tf.function(step, autograph=False).get_concrete_function(*[tf.TensorSpec([3])] * 2, tf.TensorSpec([None, 3]))


def test_whole_numbers_are_never_increments() -> None:
    def step(old: tf.Tensor) -> None:
        assert not is_increment(old, old + 1)

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
