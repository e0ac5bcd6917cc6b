"""HDF5 datasets are arrays that are never read as a whole."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from kdist.data import columns
from kdist.data.columns import Column, Hdf5Rows, as_array
from kdist.data.file_column import FileColumn, column_of
from kdist.data.sources import split_validation, training_data

VALUES = np.arange(60.0).reshape(20, 3)


@pytest.mark.parametrize("userblock_size", [0, 512])
def test_a_dataset_in_one_piece_is_memory_mapped(userblock_size: int, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=userblock_size) as file:
        file["odd"] = np.arange(7, dtype=np.uint8)
        file["x"], file["flags"] = VALUES, VALUES > 9
    with h5py.File(tmp_path / "x.h5", "r") as file:
        for name, values in (("odd", np.arange(7)), ("x", VALUES), ("flags", VALUES > 9)):
            array = as_array(file[name])
            assert isinstance(array, np.memmap)
            np.testing.assert_array_equal(array, values)
            assert isinstance(column_of(file[name]), FileColumn)


def test_others_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_BLOCK_BYTES", 5 * 3 * 8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("chunked", data=VALUES, chunks=(3, 3))
        file.create_dataset("compressed", data=VALUES, compression="gzip")
        file.create_dataset("elsewhere", data=VALUES, external=str(tmp_path / "other"))
        file["changing"] = VALUES
        assert isinstance(as_array(file["changing"]), Hdf5Rows)
    most = []
    read = h5py.Dataset.__getitem__

    def watched(dataset: h5py.Dataset, rows: Any) -> Any:
        found = read(dataset, rows)
        most.append(len(found))
        return found

    with h5py.File(tmp_path / "x.h5", "r") as file:
        for name in ("chunked", "compressed", "elsewhere"):
            rows = as_array(file[name])
            assert isinstance(rows, Hdf5Rows)
            assert type(column_of(file[name])) is Column
            assert (rows.shape, rows.ndim, len(rows)) == ((20, 3), 2, 20)
            np.testing.assert_array_equal(rows, VALUES)
            np.testing.assert_array_equal(rows[3:7], VALUES[3:7])
            with monkeypatch.context() as patch:
                patch.setattr(h5py.Dataset, "__getitem__", watched)
                for chosen in ([0, 1, 9, 11, 19], [4], range(20)):
                    np.testing.assert_array_equal(rows[np.array(chosen)], VALUES[list(chosen)])
            (x, _, _), (other, _, _) = split_validation(file[name], None, None, 0.25)
            np.testing.assert_array_equal(x, VALUES[:15])
            np.testing.assert_array_equal(other, VALUES[15:])
            assert isinstance(other, Hdf5Rows)
            np.testing.assert_array_equal(pickle.loads(pickle.dumps(other)), VALUES[15:])
    assert max(most) <= 5


def test_text_and_numbers_alone(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["text"], file["one"], file["unset"] = ["a", "b"], 3.0, h5py.Empty("f4")
        file.create_dataset("never_written", (4, 2), "f4")
    with h5py.File(tmp_path / "x.h5", "r") as file:
        assert column_of(file["text"]).dtype.name == "string"
        assert not np.any(as_array(file["never_written"])[:])
        with pytest.raises(ValueError, match="must be arrays"):
            training_data(file["one"])
