"""`arriving_files`: a folder that files keep arriving in, as training data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import tensorflow as tf

from kdist.config.checks import check_more_than_zero
from kdist.data import parquet
from kdist.data.file_formats import Csv, FileFormat, Parquet, TfRecords
from kdist.data.python_readers import offer_readers
from kdist.data.split_data import SplitSource
from kdist.data.splits import SplitEnumerator, UnreadableSplit
from kdist.errors import ConfigError

#: A file of this name says that no others will come.
END_FILE = "_END"
#: Files of these names are not complete, or are no data.
_HIDDEN = (".", "_")
_UNFINISHED = ".tmp"
_PATTERN = re.compile(r"[^/]*\.(?:(?P<tfrecord>tfrecords?)(?:\.gz)?|(?P<csv>csv)(?:\.gz)?|(?P<parquet>parquet))")


def arriving_files(
    folder: str | Path,
    pattern: str,
    parse: Callable[[Any], Any],
    *,
    columns: Mapping[str, str | tf.DType] | None = None,
    idle_secs: float = 3600.0,
    poll_secs: float = 1.0,
) -> ArrivingFiles:
    """A folder that files keep arriving in, as data for `Trainer.fit`: every file is read once, by one worker.

    A file counts as soon as it has its name: write it under a name that begins with `.` or `_` or ends in `.tmp`, which
    are passed over, and rename it. Training ends by `steps` or a signal, when all files are read and there is one with
    the name `_END`, or when no file has arrived for `idle_secs`. Each checkpoint holds the place in the data: a
    resumed run continues after the records that the checkpoint's parameters were trained on.

    Args:
        folder: the folder, at the same path on every worker; subfolders are ignored.
        pattern: a pattern of names, as `*.parquet`. It ends in `.tfrecord`, `.tfrecords`, `.csv` or `.parquet`, the
            first three also followed by `.gz`; that is the format of all of them.
        parse: makes `x`, `(x, y)` or `(x, y, sample_weight)` of the records of a batch, in operations of TensorFlow. It
            gets a string tensor `[n]` of TFRecords, or a dict of tensors `[n]` of the columns of CSV and Parquet files.
        columns: the dtype of each column: for CSV files of all columns, in the order of the files; for Parquet files of
            the columns to read. None: all columns of the first file, which must exist; all files need its schema.
        idle_secs: seconds to wait for a file, if all others are read.
        poll_secs: seconds between two looks into the folder.

    Raises:
        ConfigError: an argument is not allowed, or pyarrow is not installed.
    """
    check_more_than_zero("idle_secs", idle_secs)
    check_more_than_zero("poll_secs", poll_secs)
    if "://" in str(folder):
        raise ConfigError(f"folder={folder}: is a URL; give a folder that every worker sees at the same path")
    folder = Path(folder).absolute()
    if not folder.is_dir():
        raise ConfigError(f"folder={folder}: there is no such folder")
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ConfigError(
            f"pattern={pattern}: must be of names of files, and end in .tfrecord, .csv (also with .gz) or .parquet"
        )
    kind = match.lastgroup
    if kind == "csv" and columns is None:
        raise ConfigError(f"pattern={pattern}: CSV files need columns, as {{'label': 'int64', 'price': 'float32'}}")
    if kind == "tfrecord" and columns is not None:
        raise ConfigError(f"columns: TFRecord files have none; parse={getattr(parse, '__name__', parse)} decodes them")
    if kind == "parquet":
        parquet.require_pyarrow()
    file_format: FileFormat | None = TfRecords() if kind == "tfrecord" else None
    if columns is not None:
        dtypes = _dtypes(columns)
        file_format = Csv(dtypes) if kind == "csv" else Parquet({name: dtype.name for name, dtype in dtypes.items()})
    return ArrivingFiles(folder, pattern, file_format, parse, idle_secs, poll_secs)


def _dtypes(columns: Mapping[str, Any]) -> dict[str, tf.DType]:
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigError(f"columns={columns}: give the dtype of each column, as {{'label': 'int64'}}")
    try:
        return {name: tf.as_dtype(dtype) for name, dtype in columns.items()}
    except TypeError as error:
        raise ConfigError(f"columns: {error}") from error


@dataclass(frozen=True)
class ArrivingFiles(SplitSource):
    """The source that `arriving_files` returns; without a format, the first file has the columns of all."""

    folder: Path
    pattern: str
    given_format: FileFormat | None
    parse: Callable[[Any], Any]
    idle_secs: float
    poll_secs: float

    def enumerator(self) -> FolderEnumerator:
        # A worker in this process reads, too.
        offer_readers()
        return FolderEnumerator(self)

    def batches(self, split: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        path = tf.strings.join([f"{self.folder}{os.sep}", split])
        return self.file_format.batches(path, num_read, batch_size).map(self.parse, tf.data.AUTOTUNE)

    @cached_property
    def file_format(self) -> FileFormat:
        """The reader of the files.

        Raises:
            ConfigError: the first file has the columns, and there is none.
        """
        if self.given_format is not None:
            return self.given_format
        for name in self.names():
            try:
                return Parquet.like(self.folder / name)
            except UnreadableSplit:
                continue
        raise ConfigError(
            f"{self.folder}{os.sep}{self.pattern}: there is no Parquet file yet to take the columns from; give "
            "columns, as {'label': 'int64', 'price': 'float32'}"
        )

    def names(self) -> list[str]:
        """The names of the files that are there, in alphabetical order.

        Raises:
            OSError: the folder cannot be read.
        """
        complete = [name for name in os.listdir(self.folder) if not name.startswith(_HIDDEN)]
        return sorted(name for name in complete if fnmatchcase(name, self.pattern) and not name.endswith(_UNFINISHED))


class FolderEnumerator(SplitEnumerator):
    """Finds files in a folder; a split is a file, by its name."""

    def __init__(self, files: ArrivingFiles) -> None:
        self.place = f"{files.folder}{os.sep}{files.pattern}"
        self.poll_secs = files.poll_secs
        self.idle_secs = files.idle_secs
        self._files = files
        self._format = files.file_format
        self._found: set[str] = set()
        self._end_was_there = False
        self._has_ended = False

    def discover(self) -> list[str]:
        # A file that came just before the last one may be missing in a list that was begun before: only what is listed
        # later is all.
        self._has_ended, self._end_was_there = self._end_was_there, (self._files.folder / END_FILE).exists()
        new = [name for name in self._files.names() if name not in self._found]
        self._found.update(new)
        return new

    @property
    def ended_by(self) -> str | None:
        return str(self._files.folder / END_FILE) if self._has_ended else None

    def check(self, name: str) -> None:
        self._format.check(self._files.folder / name)

    def state(self) -> list[str]:
        return sorted(self._found)

    def restore(self, state: list[str]) -> None:
        self._found = set(state)
        self._end_was_there = self._has_ended = False
