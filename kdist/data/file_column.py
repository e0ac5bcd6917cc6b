"""`FileColumn`: examples in a file, which workers that see the file read there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._compat.first_call_lock import fetch
from kdist.data.array_files import ArrayFile, file_of
from kdist.data.columns import Column, Received, as_array
from kdist.data.hdf5 import Hdf5Rows


class FileColumn(Column):
    """A column that is in a file: workers that see the file read large shares there, the others get them sent.

    Args:
        values: memory-mapped.
        file: where they are.

    Attributes:
        probe: what `ArrayFile.trace_probe` returns; once `trace_transfer` was called.
    """

    probe: tf.types.experimental.ConcreteFunction

    def __init__(self, values: np.ndarray, file: ArrayFile) -> None:
        super().__init__(values)
        self._file = file

    def specs(self, max_rows: int) -> list[tf.TensorSpec]:
        """As those of a column. A large share has two more: the file, and which of its rows; empty if it was sent."""
        specs = super().specs(max_rows)
        return [*specs, self._file.mapped_spec, tf.TensorSpec([None], tf.int64)] if self.is_large(max_rows) else specs

    def received(self, arguments: Sequence[tf.Tensor]) -> Received:
        sent = super().received(arguments[:1])
        if len(arguments) == 1:
            return sent
        _, mapped, rows = arguments
        is_mapped = tf.size(rows) > 0

        def read(numbers: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._file.take(mapped, tf.gather(rows, numbers)), self.dtype)

        def take(numbers: tf.Tensor) -> tf.Tensor:
            taken = tf.cond(is_mapped, lambda: read(numbers), lambda: sent.take(numbers))
            return tf.ensure_shape(taken, self._spec.shape)

        return Received(tf.where(is_mapped, tf.size(rows, tf.int64), sent.num_rows), take)

    def send(self, rows: np.ndarray | slice, max_rows: int) -> list[tf.Tensor | tf.Variable]:
        if not self.is_large(max_rows):
            return super().send(rows, max_rows)
        if not self._file.is_same(np.asarray(self.values), fetch(self.probe())):
            nothing = tf.zeros([0, *self._file.mapped_spec.shape[1:]], tf.uint8)
            return [*super().send(rows, max_rows), nothing, tf.zeros([0], tf.int64)]
        numbers = self._numbers(rows)
        if isinstance(numbers, range):
            row_numbers = tf.range(numbers.start, numbers.stop, dtype=tf.int64)
        else:
            size = self.chunk_bytes
            parts = [tf.constant(numbers[i : i + size], tf.int64) for i in range(0, len(numbers), size)]
            row_numbers = tf.concat(parts, 0)
        return [self._reserved(0), self._file.map(), row_numbers]

    def trace_transfer(self, max_rows: int) -> None:
        super().trace_transfer(max_rows)
        if self.is_large(max_rows):
            self.probe = self._file.trace_probe()


def column_of(values: Any) -> Column:
    """The column of an array; see `as_array`.

    Raises:
        ConfigError: an array of Python objects, or a ragged or sparse tensor.
    """
    array = as_array(values)
    column = Column(array)
    # Workers would round to float16 by way of float32.
    is_rounded = array.dtype.kind == "f" and column.dtype.size < 4 and column.dtype != array.dtype
    if isinstance(array, Hdf5Rows) or is_rounded or (file := file_of(array)) is None:
        return column
    return FileColumn(array, file)


def columns_of(arrays: Any) -> list[Column]:
    """The columns of arrays in tuples and dicts; None, for an optional input, has none.

    Raises:
        ConfigError: see `column_of`.
        ValueError: a list of numbers or strings.
    """
    columns = [column_of(array) for array in tf.nest.flatten(arrays) if array is not None]
    if any(column.values.ndim == 0 for column in columns):
        raise ValueError("x, y and sample_weight must be arrays; make one of a list of numbers with numpy.asarray")
    return columns
