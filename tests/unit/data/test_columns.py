"""Shares of arrays reach a worker whole, however they travel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from kdist.data.base import call_with
from kdist.data.columns import Column, as_array
from kdist.data.file_column import column_of
from kdist.data.sources import training_data
from kdist.errors import ConfigError


def received(column: Column, rows: Any, max_rows: int) -> np.ndarray:
    """The rows that a worker reads of a share."""
    column.trace_transfer(max_rows)

    def read(*arguments: tf.Tensor) -> tf.Tensor:
        share = column.arrived_share(arguments)
        return share.take(tf.range(share.num_rows))

    traced = tf.function(read, autograph=False).get_concrete_function(*column.specs(max_rows))
    return call_with(traced, column.share(rows, max_rows)).numpy()


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("rows", [slice(None), slice(3, 17), np.array([1, 2, 5, 7, 11, 13, 19])], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint8", "bool", "object"])
def test_a_share_arrives_whole(dtype: str, rows: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Column, "chunk_bytes", chunk_bytes)
    numbers = np.arange(60).reshape(20, 3) % 7
    values = np.array([[str(i).encode() for i in row] for row in numbers], object) if dtype == "object" else numbers
    column = column_of(values.astype(dtype))
    found = received(column, rows, 20)
    np.testing.assert_array_equal(found, values.astype(dtype)[rows])
    assert found.dtype == (np.float32 if dtype.startswith("float") else np.dtype(dtype))


def test_a_memory_mapped_array_is_read_in_parts_and_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Column, "chunk_bytes", 64)
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100, dtype=np.float64).reshape(50, 2))
    for mode in ("r", "r+", "c"):
        values = np.load(path, mmap_mode=mode)
        if mode == "c":
            values[3] = 77
        column = column_of(values)
        assert column.values is values
        expected = np.array(values)
        np.testing.assert_array_equal(received(column, slice(None), 50), expected)
        np.testing.assert_array_equal(values, expected)


def test_python_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(2,\) has Python objects as elements"):
        training_data(np.array([[1, 2], [3]], object))


def test_ragged_and_sparse_tensors_are_no_arrays() -> None:
    ragged = tf.ragged.constant([[1, 2], []])
    for values in (ragged, ragged.to_sparse()):
        with pytest.raises(ConfigError, match=r"of shape \(2, .*from_tensor_slices\(\(x, y\)\)"):
            as_array(values)
        # They are read as a dataset.
        assert training_data(values, np.zeros(2)).batches_per_pass(1) == 1


def test_specs_copy_nothing() -> None:
    class Untouchable(np.ndarray):
        def __getitem__(self, item: Any) -> Any:
            raise AssertionError("read")

    data = training_data(np.zeros((1 << 20, 64), np.float32).view(Untouchable), batch_size=4, shuffle=False)
    assert [spec.dtype for spec in data.specs(2)] == [tf.resource]
    assert [spec.dtype for spec in data.specs(1 << 10)] == [tf.float32]
