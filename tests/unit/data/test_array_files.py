"""Rows of an array in a file are those of the array, wherever they begin; another file is told from it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from kdist.data import file_column
from kdist.data.base import make_dataset, worker_dataset
from kdist.data.columns import Column
from kdist.data.file_column import ArrayFile, FileColumn, column_of, file_of
from kdist.data.sources import split_validation, training_data

ROWS = 40


def in_file(path: Path, values: np.ndarray, before: int = 0, after: int = 0) -> np.memmap:
    """The same array in a file, between other bytes."""
    path.write_bytes(os.urandom(before) + values.tobytes() + os.urandom(after))
    return np.memmap(path, values.dtype, "r", before, values.shape)


def found(array: np.ndarray) -> ArrayFile:
    file = file_of(array)
    assert file is not None
    return file


@pytest.mark.parametrize("before", [0, 128, 2055, 70001])
@pytest.mark.parametrize("after", [0, 99])
@pytest.mark.parametrize(("dtype", "shape"), [("float32", (784,)), ("float64", (3, 5)), ("uint8", (7,)), ("int64", ())])
def test_rows_are_found_wherever_they_begin(
    dtype: str, shape: tuple[int, ...], after: int, before: int, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).integers(0, 200, (ROWS, *shape)).astype(dtype)
    file = found(in_file(tmp_path / "x", values, before, after))
    assert file.offset == before
    mapped = file.map()
    assert file.mapped_spec.is_compatible_with(mapped)
    for rows in ([], [0], [39, 0, 17, 17], range(ROWS)):
        taken = file.take(mapped, tf.constant(rows, tf.int64)).numpy()
        assert taken.dtype == dtype
        np.testing.assert_array_equal(taken, values[list(rows)])


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ],
)
def test_elements_keep_their_type(dtype: str, tmp_path: Path) -> None:
    values = (np.arange(ROWS * 3).reshape(ROWS, 3) % 2).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    file = found(np.load(tmp_path / "x.npy", mmap_mode="r"))
    taken = file.take(file.map(), tf.range(ROWS, dtype=tf.int64)).numpy()
    assert taken.dtype == values.dtype
    np.testing.assert_array_equal(taken, values)


def test_a_run_of_rows_is_in_the_file_as_well(tmp_path: Path) -> None:
    values = np.arange(ROWS * 6.0).reshape(ROWS, 6)
    mapped = in_file(tmp_path / "x", values, before=5000)
    for view in (mapped[3:30], mapped[3:30][2:], np.asarray(mapped)[7:], mapped.reshape(ROWS, 2, 3)[1:]):
        file = found(view)
        taken = file.take(file.map(), tf.range(len(view), dtype=tf.int64))
        np.testing.assert_array_equal(taken, view)
    (x, _, _), (validation_x, _, _) = split_validation(mapped, None, None, 0.25)
    assert isinstance(column_of(x), FileColumn)
    assert isinstance(column_of(validation_x), FileColumn)


def test_other_arrays_are_in_no_file(tmp_path: Path) -> None:
    values = np.arange(ROWS * 6.0).reshape(ROWS, 6)
    np.save(tmp_path / "x.npy", values)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(values))
    np.save(tmp_path / "big.npy", values.astype(">f8"))
    np.save(tmp_path / "text.npy", values.astype("S4"))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    changeable = [np.load(tmp_path / "x.npy", mmap_mode=mode) for mode in ("r+", "c")]
    others = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("fortran", "big", "text")]
    for array in (values, mapped[::2], mapped[:, 1:], mapped.T, mapped[:0], mapped * 2, *changeable, *others):
        assert file_of(array) is None
    (tmp_path / "x.npy").unlink()
    assert file_of(mapped) is None


def test_half_precision_is_rounded_where_it_was(tmp_path: Path) -> None:
    mapped = in_file(tmp_path / "x", np.arange(ROWS, dtype=np.float64))
    assert type(column_of(mapped)) is FileColumn
    keras.config.set_floatx("float16")
    try:
        assert type(column_of(mapped)) is Column
        assert type(column_of(in_file(tmp_path / "half", np.arange(ROWS, dtype=np.float16)))) is FileColumn
    finally:
        keras.config.set_floatx("float32")


def test_another_file_is_not_taken_for_the_same(tmp_path: Path) -> None:
    values = np.arange(20000.0)
    mapped = in_file(tmp_path / "x", values, before=7)
    file = found(mapped)
    content = (tmp_path / "x").read_bytes()
    others = {
        "copy": content,
        "first": content[:7] + b"!" + content[8:],
        "last": content[:-1] + b"!",
        "shorter": content[:-4096],
        "longer": content + content[-4096:],
        "empty": b"",
    }
    for name, other in others.items():
        (tmp_path / name).write_bytes(other)
    (tmp_path / "folder").mkdir()
    for name in (*others, "folder", "missing"):
        probed = replace(file, path=str(tmp_path / name)).trace_probe()().numpy()
        assert file.is_same(mapped, probed) is (name == "copy"), name


def batches(x: Any, y: Any, num_workers: int, worker: int, shuffle: bool) -> list[Any]:
    data = training_data(x, y, batch_size=8, shuffle=shuffle, seed=5)
    data.trace_transfer(num_workers)
    make = worker_dataset(data, num_workers=num_workers, batch_size=8, num_seeds=1, seed=1)
    dataset = make_dataset(make, data, worker, num_workers, 0, 3)
    return [[tensor.numpy() for tensor in tf.nest.flatten(element)] for element in dataset.take(20)]


@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("dtype", "shuffle"),
    [
        ("float64", True),
        ("uint8", False),
        pytest.param("float64", False, marks=pytest.mark.long),
        pytest.param("uint8", True, marks=pytest.mark.long),
    ],
)
def test_batches_are_those_of_arrays_in_memory(
    dtype: str, shuffle: bool, num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Column, "chunk_bytes", 16)
    x, y = np.random.default_rng(0).normal(100, 30, (ROWS, 5)).astype(dtype), np.arange(ROWS)
    from_files = [in_file(tmp_path / "x", x, 33), in_file(tmp_path / "y", y)]
    expected = [batches(x, y, num_workers, worker, shuffle) for worker in range(num_workers)]
    with monkeypatch.context() as patch:
        # From the file only.
        patch.setattr(Column, "_chunks", lambda *_: pytest.fail("rows were sent"))
        read = [batches(*from_files, num_workers, worker, shuffle) for worker in range(num_workers)]
    # A worker that does not see the file.
    monkeypatch.setattr(file_column, "file_of", lambda array: replace(found(array), path="/nowhere/x"))
    sent = [batches(*from_files, num_workers, worker, shuffle) for worker in range(num_workers)]
    for other in (read, sent):
        tf.nest.map_structure(np.testing.assert_array_equal, other, expected)
        tf.nest.map_structure(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), other, expected)
