"""Rows of variables on any task: variables whose first dimension may change, and a lock of rows."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from kdist._compat.tensorflow import UninitializedVariable, run_independently


def on_each(devices: Iterable[str], value: int, dtype: tf.DType) -> list[tf.Variable]:
    """A scalar variable on each device."""
    variables = []
    for device in devices:
        with tf.device(device):
            variables.append(tf.Variable(value, dtype=dtype, trainable=False))
    return variables


def resizable_variable(row_shape: Sequence[int], dtype: tf.DType, capacity: int = 0) -> tf.Variable:
    """A variable with room for rows, on the device of the caller; they take no memory before they are written.

    Its `shape` says that it has one row: a worker dies of a handle with an open dimension (TensorFlow 2.21).
    """
    variable = UninitializedVariable(False, shape=[1, *row_shape], dtype=dtype)

    def reserve(capacity: tf.Tensor) -> None:
        with tf.device(variable.device):
            shape = tf.stack([capacity, *row_shape])
            replace_rows(variable, tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False))

    tf.function(reserve, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))(tf.constant(capacity))
    return variable


def replace_rows(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    """Gives a resizable variable other rows, without a copy; traced."""
    # In this mode, TensorFlow would copy.
    may_share = tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
    with tf.control_dependencies([may_share]):
        # Of a shape that TensorFlow cannot compare with the variable's.
        hidden = tf.compat.v1.placeholder_with_default(value, None)
        return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=hidden)


def set_rows(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Sets rows, int64 `[n]`; traced."""
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=rows, updates=values)


def resize(variables: Iterable[tf.Variable], size: tf.Tensor, capacity: tf.Tensor) -> None:
    """Moves the rows of variables with `size` rows to places with room for `capacity`; traced.

    Rows should not be looked up meanwhile: TensorFlow would copy the whole variable first.
    """
    # Made once: the trace of a table has the operations below for each of its columns.
    new_size, all_rows = _as_vector(capacity), tf.range(tf.cast(size, tf.int32))
    for variable in variables:
        # In the other mode, TensorFlow would copy, too.
        may_share = tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
        with tf.control_dependencies([may_share]):
            rows = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        # Its true number of rows is not that of the variable's `shape`.
        rows = tf.compat.v1.placeholder_with_default(rows, [None, *variable.shape[1:]])
        replace_rows(variable, tf.raw_ops.InplaceUpdate(x=_room(variable, new_size), i=all_rows, v=rows))


def resize_in_use(variable: tf.Variable, used: tf.Tensor, capacity: tf.Tensor, rows_at_once: int) -> None:
    """As `resize`, but only the `used` rows that have values, a few at a time, while others look up rows; traced."""

    def move(start: tf.Tensor, moved: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        stop = tf.minimum(start + rows_at_once, used)
        rows = tf.range(start, stop)
        values = variable.sparse_read(rows)
        return stop, tf.raw_ops.InplaceUpdate(x=moved, i=tf.cast(rows, tf.int32), v=values)

    zero = tf.zeros([], tf.int64)
    shapes = [zero.shape, tf.TensorShape([None, *variable.shape[1:]])]
    first = [zero, _room(variable, _as_vector(capacity))]
    _, moved = tf.while_loop(lambda start, _: start < used, move, first, shapes, parallel_iterations=1)
    with tf.control_dependencies([moved]):
        replace_rows(variable, moved)


def _room(variable: tf.Variable, size: tf.Tensor) -> tf.Tensor:
    """Memory for `size` rows of a variable, int32 `[1]`, to be updated in place: it takes none before it is written."""
    row_shape = variable.shape[1:].as_list()
    shape = tf.concat([size, tf.constant(row_shape, tf.int32)], 0) if row_shape else size
    return tf.raw_ops.Empty(shape=shape, dtype=variable.dtype, init=False)


def _as_vector(number: tf.Tensor) -> tf.Tensor:
    return tf.cast(number, tf.int32)[tf.newaxis]


class RowLock:
    """Lets the updates of several workers read and write rows one after the other, so that none undoes another one.

    It is on the server of the rows, where it is made, and nothing waits for another task while it is held. A call that
    ends early releases it.

    Args:
        is_shared: whether several workers make updates; otherwise nothing is locked.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._mutex = tf.raw_ops.MutexV2(shared_name=f"kdist_{uuid.uuid4().hex}") if is_shared else None

    @contextmanager
    def held(self, arrived: Sequence[tf.Tensor]) -> Iterator[list[tf.Operation]]:
        """Locked from when `arrived` is there until the operations have run that are added to the list; traced."""
        updates: list[tf.Operation] = []
        if self._mutex is None:
            yield updates
            return
        with tf.control_dependencies(arrived):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        with tf.control_dependencies([lock]):
            yield updates
        with tf.control_dependencies(updates):
            released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        # Otherwise a server would hold it until another one has released its own, for which that one may have to wait.
        run_independently(released)
