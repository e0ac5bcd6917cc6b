"""Formats of files of records: a name, a reader that becomes part of a worker's dataset, and the number of records."""

from __future__ import annotations

import abc
import csv
import itertools
import zlib
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, ClassVar

import tensorflow as tf

from kdist.data import parquet
from kdist.data.file_blocks import GZIP, Block, blocks_of_lines, blocks_of_tfrecords, opened, whole
from kdist.data.python_readers import read_by
from kdist.data.splits import UnreadableSplit
from kdist.errors import ConfigError

#: The group of entry points by which packages offer formats: a suffix, and the class.
ENTRY_POINTS = "kdist.file_formats"


class FileFormat(abc.ABC):
    """Reads the records of a file. A format of one's own is a class derived from this one."""

    #: The files have names that end in one of these; those of gzip are also followed by `.gz`.
    suffixes: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        """The batches of the records of a file but the first `num_read`, in their order; traced for the workers.

        Args:
            path: string `[]`, on a worker.
            num_read: int64 `[]`.
            batch_size: of each batch but the last, which may have fewer records.

        Returns:
            A dataset of tensors `[n, ...]`, also in dicts and tuples.
        """

    def count(self, file: IO[bytes]) -> int:
        """The number of records in an open file, which may be compressed no more; `kdist.files` needs it.

        Raises:
            UnreadableSplit: this is no file of the format.
        """
        raise ConfigError(f"{type(self).__name__}: has no method count, by which kdist.files finds how long epochs are")

    def blocks(self, file: IO[bytes]) -> list[Block]:
        """The blocks of an open file; one for all of it, if it can only be read from its beginning."""
        return [whole(self.count(file))]

    def read(self, path: tf.Tensor, block: tf.Tensor) -> Any:
        """The records of one block, as a batch; traced for the workers. Not called for a block that is whole."""
        raise ConfigError(f"{type(self).__name__}: has no method read, by which a block of a file is read")

    def check(self, path: Path) -> None:
        """Looks at a file on the chief, before a worker reads it; see `SplitEnumerator.check`."""
        if not path.exists():
            raise UnreadableSplit("it was removed")
        if not path.is_file():
            raise UnreadableSplit("it is no file")


class TfRecords(FileFormat):
    """TFRecord files, also compressed by gzip (`.gz`). A batch is a string tensor `[n]` of serialized records."""

    suffixes = (".tfrecord", ".tfrecords")

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path, _compression(path)).skip(num_read).batch(batch_size)

    def blocks(self, file: IO[bytes]) -> list[Block]:
        return blocks_of_tfrecords(file)

    def read(self, path: tf.Tensor, block: tf.Tensor) -> tf.Tensor:
        return read_by("kdist.files.tfrecords", [path, block[1], block[2]], [tf.TensorSpec([None], tf.string)])[0]


class Csv(FileFormat):
    """CSV files as of RFC 4180, also compressed by gzip (`.gz`); the first line of each has the names of its columns.

    A batch is a dict of tensors `[n]`. An empty value is NaN in floating point, and elsewhere an error.

    Args:
        dtypes: of all columns, in the order of the file.
        chosen: the columns to read, None for all.
    """

    suffixes = (".csv",)

    def __init__(self, dtypes: Mapping[str, tf.DType], chosen: Collection[str] | None = None) -> None:
        self._dtypes = dict(dtypes)
        self._chosen = [name for name in dtypes if chosen is None or name in chosen]
        self._places = [list(dtypes).index(name) for name in self._chosen]

    @property
    def _defaults(self) -> list[Any]:
        dtypes = [self._dtypes[name] for name in self._chosen]
        return [tf.constant([float("nan")], dtype) if dtype.is_floating else tf.constant([], dtype) for dtype in dtypes]

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        lines = tf.data.experimental.CsvDataset(
            path, self._defaults, _compression(path), header=True, select_cols=self._places
        )
        return lines.skip(num_read).batch(batch_size).map(lambda *columns: dict(zip(self._chosen, columns)))

    def blocks(self, file: IO[bytes]) -> list[Block]:
        return blocks_of_lines(file)

    def read(self, path: tf.Tensor, block: tf.Tensor) -> dict[str, tf.Tensor]:
        (text,) = read_by("kdist.files.text", [path, block[1], block[2]], [tf.TensorSpec([], tf.string)])
        text = tf.strings.regex_replace(tf.strings.regex_replace(text, "\r\n", "\n"), "\n$", "")
        lines = tf.strings.split(text, "\n")
        columns = tf.io.decode_csv(lines, self._defaults, select_cols=self._places)
        return dict(zip(self._chosen, columns))

    def check(self, path: Path) -> None:
        super().check(path)
        with opened(str(path), decompress=True) as file:
            (header,) = csv_lines(file, 1)
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

    suffixes = (".parquet",)

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
        parquet.check_readable(first, types)
        return cls(types, first)

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        groups = tf.data.Dataset.from_tensors(num_read).flat_map(
            lambda number: tf.data.Dataset.from_tensor_slices(
                read_by("kdist.parquet.groups", [path, number], [tf.TensorSpec([None, 2], tf.int64)])[0]
            )
        )
        return groups.map(lambda group: self._rows(path, group)).prefetch(1).rebatch(batch_size)

    def blocks(self, file: IO[bytes]) -> list[Block]:
        return [Block(number, group, 0) for group, number in enumerate(parquet.rows_of_groups(file))]

    def read(self, path: tf.Tensor, block: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._rows(path, block[1:])

    def _rows(self, path: tf.Tensor, group: tf.Tensor) -> dict[str, tf.Tensor]:
        specs, names = list(self._specs.values()), tf.constant(list(self._specs))
        return dict(zip(self._specs, read_by("kdist.parquet.rows", [path, group, names], specs)))

    def check(self, path: Path) -> None:
        super().check(path)
        parquet.check_types(path, self._expected, of_first=self._first)


def csv_lines(file: IO[bytes], number: int) -> list[list[str]]:
    """The first lines of a CSV file, of which the first has the names of its columns; raises `UnreadableSplit`."""
    try:
        lines = csv.reader(line.decode("utf-8-sig") for line in file)
        return list(itertools.islice(lines, number)) or [[]]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UnreadableSplit(str(error)) from error


def registered_formats() -> dict[str, type[FileFormat] | Callable[[], FileFormat]]:
    """The formats by the suffixes of their files: those of kdist, and those that installed packages offer.

    A package offers one by an entry point in the group `kdist.file_formats`: its name is the suffix without the dot,
    its object a class derived from `FileFormat`, or a function, that is called without arguments.
    """
    own: dict[str, Any] = {suffix: kind for kind in (TfRecords, Csv, Parquet) for suffix in kind.suffixes}
    others = {f".{point.name}": point for point in entry_points(group=ENTRY_POINTS)}
    return {suffix: point.load() for suffix, point in others.items() if suffix not in own} | own


def _compression(path: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.strings.regex_full_match(path, rf".*\{GZIP}"), "GZIP", "")
