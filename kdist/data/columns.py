"""`Column`: an array of examples, and how a worker gets its share of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import UninitializedVariable
from kdist.errors import ConfigError


class Column:
    """One of the arrays that were passed to `fit`; it is never copied as a whole.

    Args:
        values: anything that NumPy makes an array of; a memory-mapped array stays one.

    Attributes:
        values: the array.
        dtype: what workers get: floating point in Keras's `floatx`, as Keras itself feeds it.
        reserve: gives a variable memory for some rows: `(its handle, how many)`; once `trace_transfer` was called.
        fill: sets rows of a variable: `(its handle, the first row, the rows)`; likewise.

    Raises:
        ConfigError: an array of Python objects.
    """

    #: A larger share travels in chunks of this size, or of one example.
    chunk_bytes: ClassVar[int] = 16 << 20

    reserve: tf.types.experimental.ConcreteFunction
    fill: tf.types.experimental.ConcreteFunction

    def __init__(self, values: Any) -> None:
        self.values = values if isinstance(values, np.memmap) else np.asarray(values)
        kind = self.values.dtype.kind
        if kind == "O" and not all(isinstance(item, (str, bytes)) for item in self.values.ravel()[:100]):
            raise ConfigError(
                f"an array of shape {self.values.shape} has Python objects as elements, which workers cannot get; "
                "give numbers or strings, and sequences of different lengths padded, or as a tf.data.Dataset"
            )
        as_keras_feeds = keras.config.floatx() if kind == "f" else self.values.dtype
        self.dtype = tf.string if kind in "OSU" else tf.as_dtype(as_keras_feeds)

    def share(self, rows: np.ndarray | slice, max_rows: int) -> Share:
        """The examples of one worker.

        Args:
            rows: their numbers, or where they are.
            max_rows: how many a worker gets at most; the same for all workers.
        """
        return Share(self, rows, max_rows)

    def spec(self, max_rows: int) -> tf.TensorSpec:
        """What a function for a worker takes in place of a share: a large one is in a variable, which it reads."""
        if self.is_large(max_rows):
            return tf.TensorSpec([], tf.resource)
        return tf.TensorSpec([None, *self.values.shape[1:]], self.dtype)

    def received(self, argument: tf.Tensor) -> tf.Tensor:
        """The share, from what such a function was given."""
        if argument.dtype != tf.resource:
            return argument
        value = tf.raw_ops.ReadVariableOp(resource=argument, dtype=self.dtype)
        return tf.ensure_shape(value, [None, *self.values.shape[1:]])

    def is_large(self, max_rows: int) -> bool:
        """Whether shares travel in chunks."""
        return max_rows > self.rows_per_chunk

    @property
    def rows_per_chunk(self) -> int:
        row_bytes = max(1, prod(self.values.shape[1:])) * (self.dtype.size or self.values.dtype.itemsize)
        return max(1, self.chunk_bytes // row_bytes)

    def trace_transfer(self, max_rows: int) -> None:
        """Traces what sending a large share needs: tasks know only functions that are traced after they have joined."""
        if not self.is_large(max_rows):
            return
        spec = tf.TensorSpec([None, *self.values.shape[1:]], self.dtype)

        def assign(handle: tf.Tensor, start: tf.Tensor, rows: tf.Tensor) -> None:
            stop = start + tf.shape(rows)[0]
            assigned = tf.raw_ops.ResourceStridedSliceAssign(
                ref=handle, begin=[start], end=[stop], strides=[1], value=rows
            )
            with tf.control_dependencies([assigned]):
                # Otherwise reading the variable would copy it.
                tf.raw_ops.DisableCopyOnRead(resource=handle)

        def reserve(handle: tf.Tensor, num_rows: tf.Tensor) -> None:
            memory = tf.raw_ops.Empty(shape=tf.stack([num_rows, *spec.shape[1:]]), dtype=self.dtype, init=False)
            tf.raw_ops.AssignVariableOp(resource=handle, value=memory)

        numbers = tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.int32)
        # In a function: a tensor that this process has a handle to would be copied when its first rows are set.
        self.reserve = tf.function(reserve, autograph=False).get_concrete_function(*numbers)
        self.fill = tf.function(assign, autograph=False).get_concrete_function(*numbers, spec)


def without_copies(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset over large shares. When tf.data optimizes a dataset, it copies the tensors that its functions use."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


@dataclass(frozen=True)
class Share:
    """What one worker gets of a column; see `Column.share`."""

    column: Column
    rows: np.ndarray | slice
    max_rows: int

    def send(self) -> tf.Tensor | tf.Variable:
        """Sends it to the device of the caller. A large one is in a variable, which must be kept until it is read."""
        values, dtype = self.column.values, self.column.dtype
        if not self.column.is_large(self.max_rows):
            return tf.constant(values[self.rows], dtype)
        variable = UninitializedVariable(trainable=False, shape=[None, *values.shape[1:]], dtype=dtype)
        self.column.reserve(variable.handle, tf.constant(self._num_rows))
        start = 0
        for chunk in self._chunks():
            # As an argument of a function a tensor travels several times faster than by itself.
            self.column.fill(variable.handle, tf.constant(start), tf.constant(chunk, dtype))
            start += len(chunk)
        return variable

    @property
    def _num_rows(self) -> int:
        if isinstance(self.rows, slice):
            return len(range(*self.rows.indices(len(self.column.values))))
        return len(self.rows)

    def _chunks(self) -> Iterator[np.ndarray]:
        values, rows = self.column.values, self.rows
        for start in range(0, self._num_rows, self.column.rows_per_chunk):
            stop = min(start + self.column.rows_per_chunk, self._num_rows)
            if isinstance(rows, slice):
                first = rows.indices(len(values))[0]
                yield values[first + start : first + stop]
            else:
                yield values[rows[start:stop]]
            _let_go(values)


def _let_go(values: Any) -> None:
    """Lets the system take back the memory of a memory-mapped file, which it fills again from there if it is read."""
    if isinstance(values, np.memmap) and values.mode in ("r", "r+") and hasattr(mmap, "MADV_DONTNEED"):
        base: Any = values
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_DONTNEED)
