"""Variables without values, and the slots that optimizers make for them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist._compat.reserved import cheap_constants, made_by, no_rows, reserve, reserved_slots

SHAPE = (1 << 40, 2)
ZEROS = keras.initializers.Zeros()


def reserved(shape: tuple[int, ...] = SHAPE) -> keras.Variable:
    variable = keras.Variable(no_rows, shape=shape, dtype="float32", name="table")
    reserve(variable, ZEROS)
    return variable


def test_a_reserved_variable_has_a_shape_of_any_size_and_no_values() -> None:
    variable = reserved()
    assert (tuple(variable.shape), variable.dtype, made_by(variable)) == (SHAPE, "float32", ZEROS)
    assert variable.numpy().size == 0


def test_it_may_be_made_while_a_model_is_built_symbolically() -> None:
    made: list[keras.Variable] = []

    class Table(keras.layers.Layer):
        def build(self, input_shape: tuple[int, ...]) -> None:
            self.table = self.add_weight(shape=SHAPE, initializer=no_rows)
            reserve(self.table, ZEROS)
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
    tf.function(model, autograph=False).get_concrete_function(tf.TensorSpec([2], tf.int64))
    assert made[0].numpy().size == 0
    assert model.head.kernel.numpy().shape == (2, 1)


def test_it_is_as_any_other_once_it_is_assigned() -> None:
    variable = reserved((3, 2))
    variable.assign(np.ones((3, 2)))
    assert made_by(variable) is None
    variable.assign_add(np.ones((3, 2)))
    np.testing.assert_array_equal(variable.numpy(), np.full((3, 2), 2.0))


def test_a_pure_function_may_assign_it() -> None:
    variable = reserved((3, 2))
    with keras.StatelessScope([(variable, tf.zeros((3, 2)))]) as scope:
        variable.assign(tf.ones((3, 2)))
        assert float(scope.get_current_value(variable)[0, 0]) == 1.0
    assert made_by(variable) is ZEROS


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "ftrl", "rmsprop", "sgd"])
def test_its_slots_are_reserved_too(optimizer: str) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer)
    table = reserved()
    with reserved_slots(model):
        model.optimizer.build([*model.trainable_variables, table])
    slots = [variable for variable in model.optimizer.variables if tuple(variable.shape) == SHAPE]
    assert all(made_by(slot) is not None for slot in slots)
    assert all(np.isfinite(v.numpy()).all() for v in model.optimizer.variables if tuple(v.shape) != SHAPE)


def test_constant_slots_are_what_keras_makes() -> None:
    variable = keras.Variable(np.zeros((3, 2)), dtype="float32")
    optimizer = keras.optimizers.Adagrad(initial_accumulator_value=0.3)
    with cheap_constants(optimizer):
        optimizer.build([variable])
    np.testing.assert_array_equal(optimizer.variables[-1].numpy(), np.full((3, 2), 0.3, np.float32))
