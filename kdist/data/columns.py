"""Arrays of examples, in memory or in an HDF5 file, and the share of one that a worker gets."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, TypeAlias

import h5py
import keras
import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import UninitializedVariable, argument_for_task
from kdist.errors import ConfigError

#: An argument of a function for a worker: a tensor, or a function that sends a share to the device of its caller.
WorkerArgument: TypeAlias = "tf.Tensor | Callable[[], list[tf.Tensor | tf.Variable]]"


@dataclass(frozen=True)
class ArrivedShare:
    """A share, where a worker reads it.

    Attributes:
        num_rows: the number of its examples, int64 `[]`.
        take: the numbers of some of them, `[n]` -> `[n, ...]`.
    """

    num_rows: tf.Tensor
    take: Callable[[tf.Tensor], tf.Tensor]


class Column:
    """One of the arrays that were passed to `fit`, as `as_array` returns it; it is never copied as a whole.

    Attributes:
        dtype: of the share: floating point in Keras's `floatx`, as Keras itself feeds it.
        reserve: gives a variable memory for some rows: `(its handle, their number)`; set by `trace_transfer`.
        fill: sets rows of a variable: `(its handle, the first row, the rows)`; likewise.

    Raises:
        ConfigError: an array of Python objects.
    """

    #: A larger share travels in chunks of this size, or of one example.
    chunk_bytes: ClassVar[int] = 16 << 20

    reserve: tf.types.experimental.ConcreteFunction
    fill: tf.types.experimental.ConcreteFunction

    def __init__(self, values: np.ndarray | Hdf5Rows) -> None:
        self.values = values
        kind = values.dtype.kind
        some = np.ravel(values[:100] if values.ndim else values)[:100]
        if kind == "O" and not all(isinstance(item, (str, bytes)) for item in some):
            raise ConfigError(
                f"an array of shape {values.shape} has Python objects as elements, which workers cannot get; "
                "give numbers or strings, and sequences of different lengths padded, or as a tf.data.Dataset"
            )
        as_keras_feeds = keras.config.floatx() if kind == "f" else values.dtype
        self.dtype = tf.string if kind in "OSU" else tf.as_dtype(as_keras_feeds)

    def share(self, rows: np.ndarray | slice, max_rows: int) -> WorkerArgument:
        """The share of one worker.

        Args:
            rows: the numbers of its examples, ascending, or a run of them.
            max_rows: the largest number of examples that a worker gets; the same for all workers.
        """
        return partial(self.send, rows, max_rows)

    def specs(self, max_rows: int) -> list[tf.TensorSpec]:
        """The arguments of a function for a worker that a share becomes; a large one is in a variable."""
        return [tf.TensorSpec([], tf.resource) if self.is_large(max_rows) else self._spec]

    def arrived_share(self, arguments: Sequence[tf.Tensor]) -> ArrivedShare:
        """The share, from these arguments of such a function."""
        (rows,) = arguments
        if rows.dtype == tf.resource:
            value = tf.raw_ops.ReadVariableOp(resource=rows, dtype=self.dtype)
            rows = tf.ensure_shape(value, self._spec.shape)
        return ArrivedShare(tf.shape(rows, out_type=tf.int64)[0], lambda numbers: tf.gather(rows, numbers))

    def send(self, rows: np.ndarray | slice, max_rows: int) -> list[tf.Tensor | tf.Variable]:
        """Sends a share to the device of the caller. Its variable must be kept until it is read."""
        if not self.is_large(max_rows):
            return [argument_for_task(self.values[rows], self.dtype)]
        variable = self._reserve_variable(len(self._numbers(rows)))
        start = 0
        # As an argument of a function a tensor travels several times faster than by itself.
        for chunk in map(partial(argument_for_task, dtype=self.dtype), self._chunks(rows)):
            self.fill(variable.handle, argument_for_task(start), chunk)
            start += int(chunk.shape[0])
            # Before the next one is made: each worker is sent its share at the same time.
            del chunk
        return [variable]

    def is_large(self, max_rows: int) -> bool:
        """True if shares travel in chunks."""
        return max_rows > self.rows_per_chunk

    @property
    def rows_per_chunk(self) -> int:
        row_bytes = max(1, prod(self.values.shape[1:])) * (self.dtype.size or self.values.dtype.itemsize)
        return max(1, self.chunk_bytes // row_bytes)

    def trace_transfer(self, max_rows: int) -> None:
        """Traces the functions that send a large share; after the tasks have joined, or they do not know them."""
        if not self.is_large(max_rows):
            return
        spec = self._spec

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

    @property
    def _spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([None, *self.values.shape[1:]], self.dtype)

    def _reserve_variable(self, num_rows: int) -> tf.Variable:
        variable = UninitializedVariable(trainable=False, shape=self._spec.shape, dtype=self.dtype)
        self.reserve(variable.handle, argument_for_task(num_rows))
        return variable

    def _numbers(self, rows: np.ndarray | slice) -> np.ndarray | range:
        return range(*rows.indices(len(self.values))) if isinstance(rows, slice) else rows

    def _chunks(self, rows: np.ndarray | slice) -> Iterator[np.ndarray]:
        numbers = self._numbers(rows)
        for start in range(0, len(numbers), self.rows_per_chunk):
            chosen = numbers[start : start + self.rows_per_chunk]
            yield self.values[slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen]
            _let_go(self.values)


def as_array(values: Any) -> np.ndarray | Hdf5Rows:
    """Converts anything that NumPy can, and raises `ConfigError` for ragged and sparse tensors; files are not read."""
    if isinstance(values, (tf.RaggedTensor, tf.SparseTensor)):
        raise ConfigError(
            f"a {type(values).__name__} of shape {tuple(values.shape)} is no array; give ragged and sparse tensors in "
            "a dataset: tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)"
        )
    if isinstance(values, h5py.Dataset):
        return _hdf5_array(values)
    if (pandas := sys.modules.get("pandas")) is not None and isinstance(values, pandas.Series):
        # As in Keras, a column.
        values = values.to_frame()
    return values if isinstance(values, (np.memmap, Hdf5Rows)) else np.asarray(values)


def arrived_shares(columns: Sequence[Column], max_rows: int, arguments: Sequence[tf.Tensor]) -> list[ArrivedShare]:
    """The shares of several columns, from the arguments of a function that takes all their specs."""
    remaining = iter(arguments)
    return [column.arrived_share([next(remaining) for _ in column.specs(max_rows)]) for column in columns]


def without_copies(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset over large shares. When tf.data optimizes a dataset, it copies the tensors that its functions use."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return dataset.with_options(options)


def _let_go(values: Any) -> None:
    """Lets the system take back the memory of a memory-mapped file, which it fills again from there if it is read."""
    if isinstance(values, np.memmap) and values.mode in ("r", "r+") and hasattr(mmap, "MADV_DONTNEED"):
        base: Any = values
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            base.madvise(mmap.MADV_DONTNEED)


#: Bytes that are read at once to pick single rows from them, which HDF5 does slowly.
_BLOCK_BYTES = 16 << 20


class Hdf5Rows:
    """A run of rows of an HDF5 dataset with at least one dimension."""

    def __init__(self, dataset: h5py.Dataset, start: int = 0, stop: int | None = None) -> None:
        self._dataset, self._start = dataset, start
        num_rows = (len(dataset) if stop is None else stop) - start
        self.shape: tuple[int, ...] = (num_rows, *dataset.shape[1:])
        self.ndim = len(self.shape)
        self.dtype: np.dtype = dataset.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def run(self, rows: slice) -> Hdf5Rows:
        """A run of these rows, not read."""
        start, stop, _ = rows.indices(len(self))
        return Hdf5Rows(self._dataset, self._start + start, self._start + stop)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Reads rows: a run of them, or an ascending list."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return self._dataset[self._start + start : self._start + stop]
        row_bytes = max(1, self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64)))
        size = max(1, _BLOCK_BYTES // row_bytes)
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        done = 0
        while done < len(rows):
            first = rows[done]
            end = int(np.searchsorted(rows, first + size))
            found[done:end] = self[first : rows[end - 1] + 1][rows[done:end] - first]
            done = end
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        start, stop = self._start, self._start + len(self)
        return _reopen, (self._dataset.file.filename, self._dataset.name, start, stop)


def _reopen(path: str, name: str, start: int, stop: int) -> Hdf5Rows:
    return Hdf5Rows(h5py.File(path, "r")[name], start, stop)


def _hdf5_array(dataset: h5py.Dataset) -> np.ndarray | Hdf5Rows:
    """Converts a dataset to an array, memory-mapped if its bytes are in the file as in memory."""
    if not dataset.shape:
        return np.asarray(dataset)
    offset = dataset.id.get_offset()
    is_in_one_piece = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and not dataset.external
    # A file that is being written may have parts in memory only.
    is_on_disk = offset is not None and dataset.file.mode == "r" and dataset.file.driver == "sec2"
    is_plain = dataset.dtype.kind in "biufc" and dataset.id.get_storage_size() == dataset.nbytes
    if not (is_plain and is_on_disk and is_in_one_piece):
        return Hdf5Rows(dataset)
    # HDF5 converts the elements when it reads them.
    if h5py.h5t.py_create(dataset.dtype, logical=True) != dataset.id.get_type():
        return Hdf5Rows(dataset)
    return np.memmap(dataset.file.filename, dataset.dtype, "r", offset, dataset.shape)
