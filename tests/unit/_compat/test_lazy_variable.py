"""Variables without values, and the slots that optimizers make for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist._compat.lazy_variable import cheap_constants, hand_over, lazy_above, made_by

SHAPE = (1 << 40, 2)
ONES = keras.initializers.Ones()


def lazy(shape: tuple[int, ...] = (3, 2)) -> keras.Variable:
    with lazy_above(8):
        return keras.Variable(ONES, shape=shape, dtype="float32", name="table")


def test_only_large_variables_with_an_initializer_are_lazy_and_only_in_the_context() -> None:
    with lazy_above(8):
        small = keras.Variable(ONES, shape=(2,), dtype="float32")
        given = keras.Variable(np.ones(3, np.float32))
    after = keras.Variable(ONES, shape=(3,), dtype="float32")
    assert [made_by(variable) for variable in (small, given, after, lazy())] == [None, None, None, ONES]


def test_a_lazy_variable_has_a_shape_of_any_size() -> None:
    variable = lazy(SHAPE)
    assert (tuple(variable.shape), variable.dtype, made_by(variable)) == (SHAPE, "float32", ONES)


@pytest.mark.parametrize(
    "read",
    [
        lambda variable: variable.numpy(),
        lambda variable: variable + 0,
        lambda variable: keras.ops.take(variable, [0, 1, 2], axis=0),
        lambda variable: tf.gather_nd(variable.value, [[0], [1], [2]]),
    ],
)
def test_reading_makes_its_values(read: Callable[[keras.Variable], Any]) -> None:
    variable = lazy()
    np.testing.assert_array_equal(read(variable), np.ones((3, 2)))
    assert made_by(variable) is None


def test_reading_values_that_are_elsewhere_says_so() -> None:
    variable, later = lazy(), lazy()
    for each in (variable, later):
        hand_over(each, ValueError("on the servers"))
    with pytest.raises(ValueError, match="on the servers"):
        variable.numpy()
    with pytest.raises(ValueError, match="on the servers"):
        tf.function(lambda: variable.value + 1, autograph=False)()
    assert made_by(variable) is ONES
    later.assign(np.zeros((3, 2)))
    np.testing.assert_array_equal(later.numpy(), np.zeros((3, 2)))


def test_it_may_be_made_while_a_model_is_built_symbolically() -> None:
    made: list[keras.Variable] = []

    class Table(keras.layers.Layer):
        def build(self, input_shape: tuple[int, ...]) -> None:
            self.table = self.add_weight(shape=SHAPE, initializer=ONES)
            made.append(self.table)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return keras.ops.take(self.table, x, axis=0)

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Table(), keras.layers.Dense(1)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(self.inner(x))

    model = Model()
    with lazy_above(1 << 20):
        tf.function(model, autograph=False).get_concrete_function(tf.TensorSpec([2], tf.int64))
    assert made_by(made[0]) is not None
    assert model.head.kernel.numpy().shape == (2, 1)


def test_it_is_as_any_other_once_it_is_assigned() -> None:
    variable = lazy()
    variable.assign(np.zeros((3, 2)))
    assert made_by(variable) is None
    variable.assign_add(np.ones((3, 2)))
    np.testing.assert_array_equal(variable.numpy(), np.ones((3, 2)))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda value: value.assign(np.zeros((3, 2))), [[0, 0], [0, 0], [0, 0]]),
        (lambda value: value.assign_add(np.ones((3, 2))), [[2, 2], [2, 2], [2, 2]]),
        (lambda value: value.scatter_nd_update([[1]], [[5.0, 6.0]]), [[1, 1], [5, 6], [1, 1]]),
        (lambda value: value.scatter_sub(tf.IndexedSlices([[1.0, 1.0]], [2])), [[1, 1], [1, 1], [0, 0]]),
        (tf.function(lambda value: value.assign(tf.zeros((3, 2))), autograph=False), [[0, 0], [0, 0], [0, 0]]),
        (lambda value: tf.raw_ops.AssignVariableOp(resource=value.handle, value=tf.zeros((3, 2))), np.zeros((3, 2))),
    ],
)
def test_writing_to_the_variable_of_tensorflow_counts(write: Callable[[tf.Variable], Any], expected: Any) -> None:
    variable = lazy()
    write(variable.value)
    assert made_by(variable) is None
    np.testing.assert_array_equal(variable.numpy(), expected)


def test_a_checkpoint_that_is_restored_counts(tmp_path: Path) -> None:
    layer = keras.layers.Embedding(3, 2, embeddings_initializer="zeros")
    layer.build()
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "ckpt"))
    with lazy_above(8):
        new = keras.layers.Embedding(3, 2, embeddings_initializer=ONES)
        new.build()
    assert made_by(new.embeddings) is not None
    tf.train.Checkpoint(layer=new).restore(path).expect_partial()
    assert made_by(new.embeddings) is None
    np.testing.assert_array_equal(new.embeddings.numpy(), np.zeros((3, 2)))


def test_a_pure_function_may_assign_it() -> None:
    variable = lazy()
    with keras.StatelessScope([(variable, tf.zeros((3, 2)))]) as scope:
        variable.assign(tf.ones((3, 2)))
        assert float(scope.get_current_value(variable)[0, 0]) == 1.0
    assert made_by(variable) is ONES


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "ftrl", "rmsprop", "sgd"])
def test_its_slots_are_lazy_too(optimizer: str) -> None:
    optimizer = keras.optimizers.get(optimizer)
    with lazy_above(8):
        optimizer.build([lazy(SHAPE)])
    slots = [variable for variable in optimizer.variables if tuple(variable.shape) == SHAPE]
    assert all(made_by(slot) is not None for slot in slots)
    assert all(np.isfinite(v.numpy()).all() for v in optimizer.variables if tuple(v.shape) != SHAPE)


def test_constant_slots_are_what_keras_makes() -> None:
    variable = keras.Variable(np.zeros((3, 2)), dtype="float32")
    optimizer = keras.optimizers.Adagrad(initial_accumulator_value=0.3)
    with cheap_constants(optimizer):
        optimizer.build([variable])
    np.testing.assert_array_equal(optimizer.variables[-1].numpy(), np.full((3, 2), 0.3, np.float32))
