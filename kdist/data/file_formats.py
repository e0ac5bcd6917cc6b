"""The formats of files whose records are training data: TFRecord and CSV by TensorFlow, Parquet by pyarrow."""

from __future__ import annotations

import abc
import csv
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from kdist.data import parquet
from kdist.data.python_readers import read_by
from kdist.data.splits import UnreadableSplit
from kdist.errors import ConfigError

_GZIP = ".gz"


class FileFormat(abc.ABC):
    """How the records of a file are read."""

    @abc.abstractmethod
    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        """Batches of the records of a file but the first `num_read`, in their order; see `SplitSource.batches`."""

    def check(self, path: Path) -> None:
        """Looks at a file on the chief, before a worker reads it; see `SplitEnumerator.check`."""
        if not path.exists():
            raise UnreadableSplit("it was removed")
        if not path.is_file():
            raise UnreadableSplit("it is no file")


class TfRecords(FileFormat):
    """TFRecord files, also compressed by gzip (`.gz`). A batch is a string tensor `[n]` of serialized records."""

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path, _compression(path)).skip(num_read).batch(batch_size)


class Csv(FileFormat):
    """CSV files as of RFC 4180, also compressed by gzip (`.gz`); the first line of each has the names of its columns.

    A batch is a dict of tensors `[n]`. Every value has to be there.

    Args:
        dtypes: of all columns by name, in the order of the file.
    """

    def __init__(self, dtypes: Mapping[str, tf.DType]) -> None:
        self._dtypes = dict(dtypes)

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        lines = tf.data.experimental.CsvDataset(path, list(self._dtypes.values()), _compression(path), header=True)
        return lines.skip(num_read).batch(batch_size).map(lambda *columns: dict(zip(self._dtypes, columns)))

    def check(self, path: Path) -> None:
        super().check(path)
        try:
            with gzip.open(path, "rt") if path.suffix == _GZIP else path.open() as file:
                header = next(csv.reader(file), [])
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise UnreadableSplit(str(error)) from error
        for number, (found, wanted) in enumerate(zip(header, self._dtypes), start=1):
            if found != wanted:
                raise ConfigError(f"{path}: column {number} is {found!r}, and columns says {wanted!r}")
        if len(header) != len(self._dtypes):
            raise ConfigError(f"{path}: has {len(header)} columns, and columns says {len(self._dtypes)}")


class Parquet(FileFormat):
    """Parquet files. A batch is a dict of tensors `[n]`: numbers, booleans and strings.

    Memory is needed for two row groups at a time. A null is NaN in floating point, and elsewhere an error.

    Args:
        expected: of the columns that are read by name: their dtypes, or their types in `first`.
        first: the file whose schema all files must have; None if others may have more columns.
    """

    def __init__(self, expected: Mapping[str, str], first: Path | None = None) -> None:
        self._expected = dict(expected)
        self._first = first
        dtypes = {name: parquet.dtype_of(kind) for name, kind in expected.items()} if first else expected
        self._specs = {name: tf.TensorSpec([None], dtype) for name, dtype in dtypes.items()}

    @classmethod
    def like(cls, first: Path) -> Parquet:
        """The columns of a file.

        Raises:
            UnreadableSplit: it is missing, or no Parquet file.
            ConfigError: a column is of a type that a worker cannot read.
        """
        types = parquet.types_in(first)
        if names := parquet.unsupported(types):
            raise ConfigError(
                f"{first}: {', '.join(names)} cannot be read; numbers, booleans and strings can: name those that you "
                "need in columns, as {'price': 'float32'}"
            )
        return cls(types, first)

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        names = tf.constant(list(self._specs))

        def rows(group: tf.Tensor) -> dict[str, tf.Tensor]:
            columns = read_by("kdist.parquet.rows", [path, group, names], list(self._specs.values()))
            return dict(zip(self._specs, columns))

        groups = tf.data.Dataset.from_tensors(num_read).flat_map(
            lambda number: tf.data.Dataset.from_tensor_slices(
                read_by("kdist.parquet.groups", [path, number], [tf.TensorSpec([None, 2], tf.int64)])[0]
            )
        )
        return groups.map(rows).prefetch(1).rebatch(batch_size)

    def check(self, path: Path) -> None:
        super().check(path)
        parquet.check_types(path, self._expected, of_first=self._first)


def _compression(path: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.strings.regex_full_match(path, rf".*\{_GZIP}"), "GZIP", "")


def checked_dtypes(columns: Mapping[str, Any]) -> dict[str, tf.DType]:
    """Columns and their dtypes, as `{"label": "int64", "price": tf.float32}`.

    Raises:
        ConfigError: names the column whose dtype is none.
    """
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigError(f"columns={columns}: give the dtype of each column, as {{'label': 'int64'}}")
    try:
        return {name: tf.as_dtype(dtype) for name, dtype in columns.items()}
    except TypeError as error:
        raise ConfigError(f"columns: {error}") from error
