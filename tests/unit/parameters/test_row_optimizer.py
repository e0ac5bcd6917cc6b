"""Updates of rows by several workers at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.parameters.optimizer import RowOptimizer

ROWS, DIM, TIMES = 20_000, 64, 40


def row_optimizer(variable: keras.Variable) -> RowOptimizer:
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    return RowOptimizer(optimizer, variable, variable, None, is_shared=True)


def test_updates_of_several_workers_do_not_undo_each_other() -> None:
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    rows = row_optimizer(variable)

    @tf.function(autograph=False)
    def update(number: tf.Tensor) -> None:
        gradient = tf.IndexedSlices(tf.ones([ROWS, DIM]), tf.range(ROWS, dtype=tf.int64))
        rows.apply(gradient, number)

    update(tf.constant(0, tf.int64))
    with ThreadPoolExecutor(4) as workers:
        list(workers.map(lambda number: update(tf.constant(number, tf.int64)), range(1, TIMES)))
    np.testing.assert_array_equal(variable.numpy(), -TIMES)


def test_an_update_that_fails_leaves_the_rows_to_the_next_one() -> None:
    variable = keras.Variable(np.zeros((ROWS, DIM), np.float32))
    rows = row_optimizer(variable)

    @tf.function(autograph=False)
    def update(first: tf.Tensor) -> None:
        rows.apply(tf.IndexedSlices(tf.ones([2, DIM]), tf.stack([first, 1])), tf.constant(0, tf.int64))

    with pytest.raises(tf.errors.InvalidArgumentError):
        update(tf.constant(ROWS, tf.int64))
    update(tf.constant(0, tf.int64))
    np.testing.assert_array_equal(variable.numpy()[:3, 0], [-1, -1, 0])
