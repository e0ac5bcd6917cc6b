"""Arrays of `.npz` files that stay in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kdist
from kdist.data.file_column import file_of
from kdist.data.pickling import dumps, loads
from kdist.data.table_files import read_table

ARRAYS: dict[str, Any] = {
    "x": np.arange(3000, dtype=np.float32).reshape(100, 30),
    "labels with a name": np.arange(100) % 7,
    "by_columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "none": np.zeros((0, 3)),
    "one": np.array(7),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_those_that_were_saved(save: Any, tmp_path: Path) -> None:
    save(tmp_path / "data.npz", **ARRAYS)
    loaded = kdist.load_npz(tmp_path / "data.npz")
    assert loaded.keys() == ARRAYS.keys()
    for name, expected in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], expected)
        assert loaded[name].dtype == expected.dtype
    assert isinstance(loaded["x"], np.memmap) == (save is np.savez)


def test_workers_can_find_them_in_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **ARRAYS)
    loaded = kdist.load_npz(str(tmp_path / "data.npz"))
    for name in ("x", "labels with a name"):
        file = file_of(loaded[name][10:90])
        assert file is not None
        rows = file.take(file.map(), np.array([0, 79, 5])).numpy()
        np.testing.assert_array_equal(rows, ARRAYS[name][[10, 89, 15]])


def test_other_processes_map_the_file_themselves(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **ARRAYS)
    x = kdist.load_npz(tmp_path / "data.npz")["x"]
    packed = dumps({"part": x[10:90], "reversed": x[::-1]})
    assert len(packed) < x.nbytes + 2000
    found = loads(packed)
    assert isinstance(found["part"], np.memmap)
    np.testing.assert_array_equal(found["part"], x[10:90])
    np.testing.assert_array_equal(found["reversed"], x[::-1])


def test_what_is_no_file_of_numbers_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", x=np.array([{}, None], dtype=object))
    (tmp_path / "text.npz").write_text("no archive")
    for name, message in {
        "missing.npz": "cannot be read: No such file",
        "objects.npz": "x.npy is an array of Python objects",
        "text.npz": "is no npz file of numbers",
    }.items():
        with pytest.raises(kdist.ConfigError, match=message):
            kdist.load_npz(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "shapes"),
    [
        ({"x": np.array(7)}, r"x \(\)"),
        ({"x": np.zeros((0, 3))}, r"x \(0, 3\)"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, r"x \(2,\), y \(3,\)"),
        ({}, "nothing"),
    ],
    ids=str,
)
def test_tables_have_rows_and_the_same_number_in_all_arrays(
    arrays: dict[str, Any], shapes: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(kdist.ConfigError, match=f"the same number of rows, at least 1, in all arrays; it has {shapes}"):
        read_table(tmp_path / "data.npz")
