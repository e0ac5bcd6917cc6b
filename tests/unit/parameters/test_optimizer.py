"""Updates of rows by several workers at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.parameters.optimizer import RowOptimizer
from kdist.parameters.placement.plan import Shard
from kdist.parameters.tables.rows import on_each
from kdist.parameters.tables.table import FixedTable

ROWS, DIM, TIMES = 20_000, 64, 40


def row_optimizer(variable: keras.Variable, optimizer: keras.optimizers.Optimizer | None = None) -> RowOptimizer:
    optimizer = optimizer or keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    return RowOptimizer(optimizer, "", variable, variable, table_of(variable))


def table_of(variable: keras.Variable, interval: tf.Variable | None = None) -> FixedTable:
    num_rows = variable.shape[0]
    return FixedTable("", variable.value, [Shard(0, 0, 0, num_rows)], interval, is_shared=True)


# The first adds to rows, the second replaces them.
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}])
def test_updates_of_several_workers_do_not_undo_each_other(options: dict[str, Any]) -> None:
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    rows = row_optimizer(variable, keras.optimizers.SGD(1.0, **options))
    alone = keras.Variable(np.zeros((1, 1), np.float32))
    optimizer = keras.optimizers.SGD(1.0, **options)
    for _ in range(TIMES):
        optimizer.apply([tf.ones([1, 1])], [alone])

    @tf.function(autograph=False)
    def update(number: tf.Tensor) -> None:
        gradient = tf.IndexedSlices(tf.ones([ROWS, DIM]), tf.range(ROWS, dtype=tf.int64))
        rows.apply(gradient, number)

    update(tf.constant(0, tf.int64))
    with ThreadPoolExecutor(4) as workers:
        list(workers.map(lambda number: update(tf.constant(number, tf.int64)), range(1, TIMES)))
    np.testing.assert_array_equal(variable.numpy(), np.broadcast_to(alone.numpy(), [ROWS, DIM]))


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.5])),
        keras.optimizers.SGD(0.5, weight_decay=0.1),
        keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
        keras.optimizers.SGD(0.5, use_ema=True),
    ],
    ids=["schedule", "weight decay", "momentum", "moving average"],
)
def test_rows_get_what_keras_gives_a_whole_variable(optimizer: keras.optimizers.Optimizer) -> None:
    whole = keras.Variable(np.ones((3, 2), np.float32))
    by_keras = type(optimizer).from_config(optimizer.get_config())
    variable = keras.Variable(np.ones((3, 2), np.float32))
    rows = row_optimizer(variable, optimizer)
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    for step in range(5):
        by_keras.apply([tf.constant(values)], [whole])
        rows.apply(tf.IndexedSlices(tf.constant(values), tf.range(3, dtype=tf.int64)), tf.constant(step, tf.int64))
    np.testing.assert_allclose(variable.numpy(), whole.numpy(), rtol=1e-6)


def test_rows_that_are_added_to_are_marked() -> None:
    variable = keras.Variable(np.zeros((4, 2), np.float32))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    table = table_of(variable, on_each([""], 1, tf.int32)[0])
    rows = RowOptimizer(optimizer, "", variable, variable, table)
    rows.apply(tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 3], tf.int64)), tf.constant(0, tf.int64))
    np.testing.assert_array_equal(table.changed(tf.constant(0))["ids"], [1, 3])


def test_an_update_that_fails_leaves_the_rows_to_the_next_one() -> None:
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    rows = row_optimizer(variable, keras.optimizers.SGD(1.0, momentum=0.1))

    @tf.function(autograph=False)
    def update(first: tf.Tensor) -> None:
        rows.apply(tf.IndexedSlices(tf.ones([2, DIM]), tf.stack([first, 1])), tf.constant(0, tf.int64))

    with pytest.raises(tf.errors.InvalidArgumentError):
        update(tf.constant(ROWS, tf.int64))
    update(tf.constant(0, tf.int64))
    np.testing.assert_array_equal(variable.numpy()[:3, 0] != 0, [True, True, False])
