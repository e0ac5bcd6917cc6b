"""Examples in a file, which workers that see the file read there."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._compat.first_call_lock import fetch
from kdist._compat.tensorflow import argument_for_task
from kdist.data.columns import ArrivedShare, Column, Hdf5Rows, as_array

#: Rows are gathered from units of at most this size: the system maps a file at a page, whatever comes before the rows.
_UNIT_BYTES = 64
_PROBES = 16
_PROBE_BYTES = 4096
_NUMBERS = {
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}


@dataclass(frozen=True)
class ArrayFile:
    """An array at an offset in the file at an absolute path: its bytes are as they are in memory, row after row."""

    path: str
    file_bytes: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def mapped_spec(self) -> tf.TensorSpec:
        """The spec of the result of `map`."""
        return tf.TensorSpec([None, self._unit], tf.uint8)

    def map(self) -> tf.Tensor:
        """The file up to the end of the array, on the device of the caller, in memory that the system can take back."""
        num_units = -(-self._end // self._unit)
        return tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[num_units, self._unit], memory_region_name=self.path)

    def take(self, mapped: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Takes rows of the array from the result of `map`: their numbers, int64 `[n]` -> `[n, *shape[1:]]`."""
        first, shift = divmod(self.offset, self._unit)
        units_per_row = self._row_bytes // self._unit
        num_units = units_per_row + (shift > 0)
        units = first + rows[:, None] * units_per_row + tf.range(num_units, dtype=tf.int64)
        content = tf.reshape(tf.gather(mapped, units), [-1, num_units * self._unit])
        content = content[:, shift : shift + self._row_bytes]
        if self.dtype == bool:
            return tf.cast(tf.reshape(content, [-1, *self.shape[1:]]), tf.bool)
        of_one = [self.dtype.itemsize] if self.dtype.itemsize > 1 else []
        return tf.bitcast(tf.reshape(content, [-1, *self.shape[1:], *of_one]), self.dtype)

    def trace_probe(self) -> tf.types.experimental.ConcreteFunction:
        """Traces a function that reads parts of the file: no strings where there is none, or one of another size."""
        size = self._probe_bytes

        def part(position: tf.Tensor) -> tf.Tensor:
            footer_bytes = self.file_bytes - size - position
            return tf.data.FixedLengthRecordDataset(self.path, size, position, footer_bytes).get_single_element()

        def probe() -> tf.Tensor:
            # Parts that cannot be read are left out: an error would come back later, as one of the task.
            parts = tf.data.Dataset.from_tensor_slices(self._probe_positions()).map(part).ignore_errors()
            return parts.reduce(tf.zeros([0], tf.string), lambda found, content: tf.concat([found, [content]], 0))

        return tf.function(probe, autograph=False).get_concrete_function()

    def is_same(self, values: np.ndarray, probed: np.ndarray) -> bool:
        """True if a probe has found the content of the array."""
        content = values.reshape(-1).view(np.uint8)
        starts = self._probe_positions() - self.offset
        return list(probed) == [content[start : start + self._probe_bytes].tobytes() for start in starts]

    def _probe_positions(self) -> np.ndarray:
        last = self._end - self._probe_bytes
        return np.unique(np.linspace(self.offset, last, _PROBES).astype(np.int64))

    @property
    def _probe_bytes(self) -> int:
        return min(_PROBE_BYTES, self._end - self.offset)

    @property
    def _row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def _end(self) -> int:
        return self.offset + self.shape[0] * self._row_bytes

    @property
    def _unit(self) -> int:
        """The size of a unit in bytes: a row consists of whole units, which need not begin with it."""
        unit = gcd(_UNIT_BYTES, self._row_bytes)
        # The last unit may not go beyond the file.
        return unit if -(-self._end // unit) * unit <= self.file_bytes else gcd(unit, self.offset)


def file_of(values: np.ndarray) -> ArrayFile | None:
    """Finds the file of a memory-mapped array, or of a run of its rows.

    None if its rows are not there one after the other, as little-endian numbers, or if it can be changed in memory.
    """
    mapped: np.memmap | None = None
    base: Any = values
    while isinstance(base, np.ndarray):
        mapped, base = base if isinstance(base, np.memmap) else mapped, base.base
    if not (isinstance(base, mmap.mmap) and mapped is not None and mapped.mode == "r" and mapped.filename):
        return None
    is_plain = values.dtype.name in _NUMBERS and values.dtype.isnative and sys.byteorder == "little"
    if not (is_plain and values.flags.c_contiguous and values.ndim and values.size):
        return None
    path = Path(mapped.filename).absolute()
    if not path.is_file():
        return None
    mapped_from = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY
    begin = np.frombuffer(base, np.uint8).__array_interface__["data"][0]
    offset = mapped_from + values.__array_interface__["data"][0] - begin
    return ArrayFile(str(path), path.stat().st_size, offset, values.shape, values.dtype)


class FileColumn(Column):
    """A column that is in a file: workers that see the file read large shares there, the others get them sent."""

    #: See `ArrayFile.trace_probe`; set by `trace_transfer`.
    probe: tf.types.experimental.ConcreteFunction

    def __init__(self, values: np.ndarray, file: ArrayFile) -> None:
        super().__init__(values)
        self._file = file

    def specs(self, max_rows: int) -> list[tf.TensorSpec]:
        """As in `Column`. A large share has two more: the file, and the numbers of its rows; empty if it was sent."""
        specs = super().specs(max_rows)
        return [*specs, self._file.mapped_spec, tf.TensorSpec([None], tf.int64)] if self.is_large(max_rows) else specs

    def arrived_share(self, arguments: Sequence[tf.Tensor]) -> ArrivedShare:
        sent = super().arrived_share(arguments[:1])
        if len(arguments) == 1:
            return sent
        _, mapped, rows = arguments
        is_mapped = tf.size(rows) > 0

        def read(numbers: tf.Tensor) -> tf.Tensor:
            return tf.cast(self._file.take(mapped, tf.gather(rows, numbers)), self.dtype)

        def take(numbers: tf.Tensor) -> tf.Tensor:
            taken = tf.cond(is_mapped, lambda: read(numbers), lambda: sent.take(numbers))
            return tf.ensure_shape(taken, self._spec.shape)

        return ArrivedShare(tf.where(is_mapped, tf.size(rows, tf.int64), sent.num_rows), take)

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
            parts = [argument_for_task(numbers[i : i + size], tf.int64) for i in range(0, len(numbers), size)]
            row_numbers = tf.concat(parts, 0)
        return [self._reserve_variable(0), self._file.map(), row_numbers]

    def trace_transfer(self, max_rows: int) -> None:
        super().trace_transfer(max_rows)
        if self.is_large(max_rows):
            self.probe = self._file.trace_probe()


def column_of(values: Any) -> Column:
    """The column of an array; raises as `Column` and `as_array`."""
    array = as_array(values)
    column = Column(array)
    # Workers would round to float16 by way of float32.
    is_rounded = array.dtype.kind == "f" and column.dtype.size < 4 and column.dtype != array.dtype
    if isinstance(array, Hdf5Rows) or is_rounded or (file := file_of(array)) is None:
        return column
    return FileColumn(array, file)


def columns_of(arrays: Any) -> list[Column]:
    """The columns of arrays in tuples and dicts; None, for an optional input, has none.

    Raises as `column_of`, and `ValueError` for a list of numbers or strings.
    """
    columns = [column_of(array) for array in tf.nest.flatten(arrays) if array is not None]
    if any(column.values.ndim == 0 for column in columns):
        raise ValueError("x, y and sample_weight must be arrays; make one of a list of numbers with numpy.asarray")
    return columns
