"""Parquet files by pyarrow, in the process that reads them: the chief looks at schemas, workers read rows.

TensorFlow has no op that reads Parquet. `rows` and `groups` are called by functions of TensorFlow, see
`kdist.data.python_readers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from kdist.data.file_blocks import opened
from kdist.data.splits import UnreadableSplit
from kdist.errors import ConfigError, install_command

if TYPE_CHECKING:
    import pyarrow


def require_pyarrow() -> Any:
    """Returns pyarrow, with its module `parquet`; raises `ConfigError` if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"Parquet files need pyarrow: {install_command('parquet')} ({error})") from error
    return pyarrow


@contextmanager
def _reading() -> Iterator[Any]:
    """Yields `pyarrow.parquet`, whose errors become `UnreadableSplit`."""
    import pyarrow.parquet

    try:
        yield pyarrow.parquet
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableSplit(" ".join(str(error).split())[:300]) from error


def types_in(file: Path | IO[bytes]) -> dict[str, str]:
    """The type of each column, as pyarrow calls it; raises `UnreadableSplit` if this is no Parquet file."""
    with _reading() as parquet:
        schema = parquet.read_schema(file)
    return {field.name: str(field.type) for field in schema}


def dtype_of(arrow_type: str) -> str | None:
    """The name of the TensorFlow dtype that a worker makes of a type; None if it cannot read it."""
    known = {"bool": "bool", "halffloat": "float16", "float": "float32", "double": "float64"}
    known |= {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    texts = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    known |= dict.fromkeys(texts, "string")
    known |= {f"dictionary<values={text}, indices=int32, ordered=0>": "string" for text in texts}
    return known.get(arrow_type)


def check_readable(place: str | Path, types: Mapping[str, str]) -> None:
    """Refuses columns whose types a worker cannot read, by a `ConfigError`."""
    if names := [f"{name}: {kind}" for name, kind in types.items() if dtype_of(kind) is None]:
        raise ConfigError(
            f"{place}: {', '.join(names)} cannot be read; numbers, booleans and strings can: name those that you need "
            "in columns"
        )


def check_types(path: Path, expected: Mapping[str, str], *, of_first: Path | None) -> None:
    """Compares the columns of a file with those of the first one, or with the user's dtypes.

    Args:
        expected: the type of each column, of pyarrow if `of_first`, otherwise the dtype.
        of_first: the first file; None if the user gave the dtypes, and other columns do not matter.

    Raises:
        ConfigError: names the file, the column and both types.
        UnreadableSplit: the file is missing, or no Parquet file.
    """
    found = types_in(path)
    source = "columns says" if of_first is None else f"{of_first.name} has"
    for name, wanted in expected.items():
        present = found.get(name)
        if present is None:
            there = ", ".join(found)
            raise ConfigError(f"{path}: has no column {name}, for which {source} {wanted}; it has {there}")
        if present != wanted if of_first else dtype_of(present) != wanted:
            raise ConfigError(f"{path}: column {name} is {present}, and {source} {wanted}; all files need one schema")
    if of_first and (others := [name for name in found if name not in expected]):
        raise ConfigError(
            f"{path}: column {others[0]} is {found[others[0]]}, and {of_first.name} has no such column; all files need "
            "one schema, or give columns"
        )


def rows_of_groups(file: IO[bytes]) -> list[int]:
    """The number of rows in each row group; raises `UnreadableSplit` if this is no Parquet file."""
    with _reading() as parquet:
        metadata = parquet.read_metadata(file)
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def groups(path: bytes, num_read: np.ndarray) -> np.ndarray:
    """The row groups of a file that come after `num_read` rows: int64 `[n, 2]`, with the number of rows to leave out.

    Raises `UnreadableSplit` if this is no Parquet file.
    """
    with _reading() as parquet:
        metadata = parquet.read_metadata(path.decode())
    left_out, found = int(num_read), []
    for group in range(metadata.num_row_groups):
        num_rows = metadata.row_group(group).num_rows
        if left_out < num_rows:
            found.append([group, left_out])
        left_out = max(0, left_out - num_rows)
    return np.array(found, np.int64).reshape(-1, 2)


def rows(path: bytes, group: np.ndarray, names: np.ndarray) -> list[np.ndarray]:
    """Columns of the rows of one of the `groups`, by their names, bytes `[n]`.

    Raises:
        UnreadableSplit: they cannot be read.
        ValueError: a value is missing where only floating point has a number for that, or a type changed.
    """
    number, left_out = map(int, group)
    with _reading() as parquet, opened(path.decode()) as file:
        table = parquet.ParquetFile(file).read_row_group(number, [name.decode() for name in names])
    return [_array(path.decode(), name.decode(), table.column(name.decode()))[left_out:] for name in names]


def _array(path: str, name: str, column: pyarrow.ChunkedArray) -> np.ndarray:
    import pyarrow

    dtype = dtype_of(str(column.type))
    if dtype == "string":
        column = column.cast(pyarrow.binary())
    if column.null_count and not pyarrow.types.is_floating(column.type):
        raise ValueError(f"{path}: column {name}, of type {column.type}, has {column.null_count} nulls")
    values: np.ndarray = column.to_numpy()
    return values
