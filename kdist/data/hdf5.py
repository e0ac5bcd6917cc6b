"""HDF5 datasets as arrays that are read when they are needed."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

#: How much is read at once to pick single rows from it, which HDF5 does slowly.
_BLOCK_BYTES = 16 << 20


class Hdf5Rows:
    """A run of rows of an HDF5 dataset.

    Args:
        dataset: with at least one dimension.
        start, stop: which rows; all if None.
    """

    def __init__(self, dataset: h5py.Dataset, start: int = 0, stop: int | None = None) -> None:
        self._dataset, self._start = dataset, start
        num_rows = (len(dataset) if stop is None else stop) - start
        self.shape: tuple[int, ...] = (num_rows, *dataset.shape[1:])
        self.dtype: np.dtype = dataset.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def run(self, rows: slice) -> Hdf5Rows:
        """Some of these rows, not read."""
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
        return _reopened, (self._dataset.file.filename, self._dataset.name, start, stop)


def _reopened(path: str, name: str, start: int, stop: int) -> Hdf5Rows:
    return Hdf5Rows(h5py.File(path, "r")[name], start, stop)


def hdf5_array(dataset: h5py.Dataset) -> np.ndarray | Hdf5Rows:
    """A dataset as an array, which is memory-mapped if it is in the file as it would be in memory."""
    if not dataset.shape:
        return np.asarray(dataset)
    offset = dataset.id.get_offset()
    is_in_one_piece = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS and not dataset.external
    # A file that is being written may have parts in memory only.
    is_on_disk = offset is not None and dataset.file.mode == "r" and dataset.file.driver == "sec2"
    is_plain = dataset.dtype.kind in "biufc" and dataset.id.get_storage_size() == dataset.nbytes
    if is_plain and is_on_disk and is_in_one_piece and _is_numpys(dataset):
        return np.memmap(dataset.file.filename, dataset.dtype, "r", offset, dataset.shape)
    return Hdf5Rows(dataset)


def _is_numpys(dataset: h5py.Dataset) -> bool:
    """Whether HDF5 would not convert the elements when it reads them."""
    return h5py.h5t.py_create(dataset.dtype, logical=True) == dataset.id.get_type()
