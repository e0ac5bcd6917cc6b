"""Arrays by name in files: `.npz`, `.csv` and `.parquet`; written complete or not at all."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from kdist.data.parquet import require_pyarrow
from kdist.errors import ConfigError

FORMATS = (".npz", ".csv", ".parquet")


def read_table(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, by name.

    A column of a CSV file, whose first line has the names, is int64, else float64, in which an empty value is NaN, else
    strings; all are `[n]`. A list column of a Parquet file is `[n, k]`.

    Raises:
        ConfigError: the file cannot be read, is not of this format, or has no rows.
    """
    readers = {".npz": load_npz, ".csv": _read_csv, ".parquet": _read_parquet}
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        arrays = readers[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: is no {path.suffix[1:]} file that can be read: {error}") from error
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise ConfigError(f"{path}: must have the same number of rows, at least 1, in all arrays; it has {shapes}")
    return arrays


def write_table(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays `[n, ...]` of one length to a file of the format that its name ends in.

    Where a row of an array has several values, a CSV file has a column for each, `name_0` and so on, and a Parquet file
    a column of lists.

    Raises:
        OSError: it cannot be written.
        ConfigError: pyarrow, which Parquet files need, is not installed.
    """
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".csv":
        _write_csv(path, arrays)
    else:
        _write_parquet(path, arrays)


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = csv.reader(file)
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} values, and there are {len(header)} columns")
    return {name: _parsed(column) for name, column in zip(header, zip(*rows))} if rows else {}


def _parsed(column: Sequence[str]) -> np.ndarray:
    try:
        return np.array([int(text) for text in column], np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(text or "nan") for text in column], np.float64)
    except ValueError:
        return np.array(column)


def _read_parquet(path: Path) -> dict[str, np.ndarray]:
    pyarrow = require_pyarrow()
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(" ".join(str(error).split())) from error
    arrays = {}
    for name, column in zip(table.column_names, table.columns):
        is_list = hasattr(column.type, "value_type") and not pyarrow.types.is_dictionary(column.type)
        arrays[name] = np.array(column.to_pylist()) if is_list else column.to_numpy()
        if arrays[name].dtype == object and any(value is None for value in arrays[name]):
            raise ValueError(f"column {name} has nulls")
    return arrays


def _write_csv(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    columns = {name: column for key, array in arrays.items() for name, column in _columns(key, array)}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(map(_text, column) for column in columns.values())))


def _columns(name: str, array: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    rows = array.reshape(len(array), -1)
    if rows.shape[1] == 1:
        return [(name, rows[:, 0])]
    return [(f"{name}_{index}", rows[:, index]) for index in range(rows.shape[1])]


def _text(value: Any) -> str:
    # As few digits as give the same number again.
    return value.decode() if isinstance(value, bytes) else str(value)


def _write_parquet(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    pyarrow = require_pyarrow()

    def column(array: np.ndarray) -> Any:
        rows = array.reshape(len(array), -1)
        if rows.shape[1] == 1:
            return pyarrow.array(rows[:, 0])
        return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.ravel()), rows.shape[1])

    pyarrow.parquet.write_table(pyarrow.table({name: column(array) for name, array in arrays.items()}), path)


_SUFFIX = ".npy"
#: Of an entry, before its name; the last four are the lengths of the name and of the extra field behind it.
_HEADER_BYTES = 30


def load_npz(path: str | Path) -> dict[str, np.ndarray]:
    """Loads a file of `numpy.savez`; its arrays stay in the file, as with `numpy.load(path, mmap_mode="r")`.

    They can be larger than memory, and workers that see the file read their examples there. Arrays of a compressed file
    (`numpy.savez_compressed`) are loaded.

    Args:
        path: the file.

    Returns:
        The arrays by name, read-only if they are in the file.

    Raises:
        ConfigError: there is no such file, it is no `.npz` file, or an array in it is of Python objects.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(_SUFFIX)]
            return {
                entry.filename.removesuffix(_SUFFIX): _mapped(Path(path), file, entry)
                if entry.compress_type == zipfile.ZIP_STORED
                else _loaded(archive, entry)
                for entry in entries
            }
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: is no npz file of numbers: {error}") from error


def _mapped(path: Path, file: IO[bytes], entry: zipfile.ZipInfo) -> np.ndarray:
    file.seek(entry.header_offset)
    header = file.read(_HEADER_BYTES)
    file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{entry.filename} is an array of Python objects")
    if 0 in shape:
        # An empty array cannot be mapped.
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")


def _loaded(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
