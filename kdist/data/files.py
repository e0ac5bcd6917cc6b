"""`files`: files of records as data for many epochs, which workers read block by block.

An epoch is a sequence of records: those of all files, which are in another order in each epoch if they are shuffled. A
worker reads a range of it at a time. The order of files follows from the seed and the number of the epoch alone, and
that of the records of a range from its place as well, so that a resumed run finds its place at once.
"""

from __future__ import annotations

import glob
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import argument_for_task
from kdist.config.checks import check_more_than_zero
from kdist.config.suggestions import did_you_mean
from kdist.data import parquet
from kdist.data.base import DataContext, Readers, TrainingData
from kdist.data.columns import WorkerArgument
from kdist.data.file_blocks import GZIP, Block, is_url, opened, whole
from kdist.data.file_formats import Csv, FileFormat, Parquet, TfRecords, csv_lines, registered_formats
from kdist.data.python_readers import offer_readers
from kdist.data.splits import Split, Splits, UnreadableSplit
from kdist.errors import ConfigError

#: Files of these names are not complete, or are no data.
HIDDEN = (".", "_")
UNFINISHED = ".tmp"
_CHUNK = 1024
#: Of a CSV file without `columns`, to find its dtypes.
_LINES_TO_COMPARE = 1000
#: A worker takes tens of milliseconds to begin a range.
_FEWEST_BATCHES = 16
#: The most that `steps_per_call=auto` takes.
_STEPS_OF_CALLS = 64


def files(
    path: str | Path | Sequence[str | Path],
    parse: Callable[[Any], Any] | None = None,
    *,
    label: str | Sequence[str] | None = None,
    sample_weight: str | None = None,
    columns: Mapping[str, Any] | Sequence[str] | None = None,
    features: Mapping[str, Any] | None = None,
    shuffle_records: int = 10_000,
    file_format: FileFormat | None = None,
) -> Files:
    """Files of records, as data of `fit`, `evaluate` and `predict`: every record is used once in an epoch.

    The chief looks into the files to find the number of their records; the workers read the records. With asynchronous
    parameter servers, workers take turns with ranges of the epoch, so a slow one reads less.

    Args:
        path: a folder, a pattern (`data/*.csv`), a file, or several of these; also URLs that fsspec knows. All of the
            same format, by the ends of their names: `.parquet`, `.csv`, `.tfrecord`, the last two also with `.gz`. Each
            worker sees them at the same place. In a folder, names that begin with `.` or `_` or end in `.tmp` are
            skipped.
        parse: makes `x`, `(x, y)` or `(x, y, sample_weight)` of the records of a batch, in operations of TensorFlow. It
            gets a dict of tensors `[n, ...]` of the columns or features; of TFRecord files without `features` a string
            tensor `[n]`. If `label` is given, it gets `(x, y)` or `(x, y, sample_weight)` as arguments.
        label: the column, or columns, of `y`; the others become the dict `x`.
        sample_weight: the column of the sample weights.
        columns: the columns to read, by name; also with their dtypes. None: all. The dtypes of CSV files that are not
            given are found in the first 1,000 lines: int64, else float32, else string.
        features: of `tf.train.Example` records: name -> dtype, or `(dtype, shape)`, or a feature of `tf.io`. Dtypes
            other than float32, int64 and string are decoded from the bytes of a string.
        shuffle_records: how many records are shuffled with each other, in memory; the order of files is shuffled, too.
            `fit(shuffle=False)` reads them in order.
        file_format: a format of your own, see `kdist.FileFormat`.

    Raises:
        ConfigError: there is no such file, it cannot be read, or an argument does not fit the format.
    """
    check_more_than_zero("shuffle_records", shuffle_records)
    places = _places(path, None if file_format is None else file_format.suffixes)
    first, found = places[0], None
    kind: Any = _kind_of(path, places) if file_format is None else file_format
    if kind is Csv:
        dtypes = _csv_dtypes(first, columns)
        file_format, found = Csv(dtypes, columns), [name for name in dtypes if columns is None or name in columns]
    elif kind is Parquet:
        file_format, found = _parquet(first, columns)
    elif columns is not None:
        raise ConfigError(f"columns: {first} has none; give features, or decode the records with parse")
    elif file_format is None:
        file_format = kind()
    if features is not None and kind is not TfRecords:
        raise ConfigError(f"features: are of TFRecord files, not of {first}; use columns")
    _check_names(first, {"label": _names(label), "sample_weight": _names(sample_weight)}, features or found)
    if sample_weight is not None and label is None:
        raise ConfigError(f"sample_weight={sample_weight}: needs label as well; or return the weights from parse")
    select = Select(None if features is None else dict(features), label, sample_weight)
    steps: tuple[Callable[..., Any], ...] = (select,) if parse is None else (select, parse)
    return Files(tuple(places), file_format, steps, int(shuffle_records))


def _kind_of(path: Any, places: Sequence[str]) -> Any:
    """The format of files, by the ends of their names."""
    known = registered_formats()
    suffixes = sorted({os.path.splitext(place.removesuffix(GZIP))[1] for place in places})
    if len(suffixes) > 1 or suffixes[0] not in known:
        raise ConfigError(
            f"path={path}: has files that end in {', '.join(suffixes)}; give files of one format: "
            f"{', '.join(sorted(known))}"
        )
    return known[suffixes[0]]


def _check_names(place: str, names: Mapping[str, Sequence[str]], found: Collection[str] | None) -> None:
    for key, name in [(key, name) for key, of_key in names.items() for name in of_key]:
        if found is None:
            raise ConfigError(f"{key}={name}: {place} has no columns; give features, or decode the records with parse")
        if name not in found:
            hint = did_you_mean(name, found)
            raise ConfigError(f"{key}={name}: {place} has {', '.join(found)}" + (f"; {hint}" if hint else ""))


def _names(names: str | Sequence[str] | None) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _places(path: Any, suffixes: Sequence[str] | None) -> list[str]:
    """The files of a path, in alphabetical order."""
    if not isinstance(path, (str, Path)):
        return [place for each in path for place in _places(each, suffixes)]
    text = str(path)

    def fits(name: str) -> bool:
        return (
            not name.startswith(HIDDEN)
            and not name.endswith(UNFINISHED)
            and (not suffixes or name.removesuffix(GZIP).endswith(tuple(suffixes)))
        )

    if is_url(text):
        import fsspec

        try:
            system, inside = fsspec.url_to_fs(text)
            is_folder = not re.search(r"[*?\[]", inside) and system.isdir(inside)
            found = [system.unstrip_protocol(name) for name in system.glob(f"{inside}/*" if is_folder else inside)]
        except (OSError, ImportError, ValueError) as error:
            raise ConfigError(f"path={text}: cannot be read: {error}") from error
    else:
        is_folder = os.path.isdir(text)
        pattern = os.path.join(glob.escape(text), "*") if is_folder else text
        found = [os.path.abspath(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)]
        found = found or ([os.path.abspath(text)] if os.path.isfile(text) else [])
    chosen = sorted(name for name in found if not is_folder or fits(os.path.basename(name)))
    if not chosen:
        raise ConfigError(f"path={text}: there is no such file" if not is_folder else f"path={text}: has no files")
    return chosen


def _csv_dtypes(place: str, columns: Any) -> dict[str, tf.DType]:
    """The dtypes of all columns of a CSV file."""
    try:
        with opened(place, decompress=True) as file:
            names, *lines = csv_lines(file, _LINES_TO_COMPARE)
    except (OSError, UnreadableSplit) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from error
    dtypes = {}
    for name, *values in zip(names, *lines):
        filled = [value for value in values if value]
        of_all = {kind for kind in (int, float) if all(_is_of(kind, value) for value in filled)}
        dtypes[name] = tf.int64 if int in of_all and len(filled) == len(values) else tf.float32 if of_all else tf.string
    _check_columns(place, columns, dtypes)
    given = columns if isinstance(columns, Mapping) else {}
    return dtypes | {name: _dtype(name, kind) for name, kind in given.items()}


def _is_of(kind: type, value: str) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return "_" not in value


def _parquet(place: str, columns: Any) -> tuple[Parquet, list[str]]:
    """The format of Parquet files, and the columns to read."""
    parquet.require_pyarrow()
    try:
        with opened(place) as file:
            types = parquet.types_in(file)
    except (OSError, UnreadableSplit) as error:
        raise ConfigError(f"{place}: cannot be read: {error}") from error
    _check_columns(place, columns, types)
    if isinstance(columns, Mapping):
        return Parquet({name: _dtype(name, kind).name for name, kind in columns.items()}), list(columns)
    chosen = {name: kind for name, kind in types.items() if columns is None or name in columns}
    parquet.check_readable(place, chosen)
    return Parquet({name: str(parquet.dtype_of(kind)) for name, kind in chosen.items()}), list(chosen)


def _check_columns(place: str, columns: Any, found: Mapping[str, Any]) -> None:
    if isinstance(columns, str) or not (columns is None or columns):
        raise ConfigError(f"columns={columns!r}: give the names of columns, as ['age', 'price'], or with their dtypes")
    for name in columns or ():
        if name not in found:
            hint = did_you_mean(name, found)
            raise ConfigError(f"columns: {place} has {', '.join(found)}, no {name}" + (f"; {hint}" if hint else ""))


def _dtype(name: str, kind: Any) -> tf.DType:
    try:
        return tf.as_dtype(kind)
    except TypeError as error:
        raise ConfigError(f"{name}: {kind!r} is no dtype, as float32, int64 or string") from error


@dataclass(frozen=True)
class Select:
    """Makes a batch for Keras of the columns of records.

    Attributes:
        features: of serialized examples; None for records that are columns already.
        label, sample_weight: columns that are not part of `x`.
    """

    features: Mapping[str, Any] | None
    label: str | Sequence[str] | None
    sample_weight: str | None

    def __call__(self, records: Any) -> Any:
        columns = records if self.features is None else _examples(records, self.features)
        if self.label is None:
            return columns
        targets = [*_names(self.label), *_names(self.sample_weight)]
        x = {name: column for name, column in columns.items() if name not in targets}
        labels = [columns[name] for name in _names(self.label)]
        y = labels[0] if isinstance(self.label, str) else tuple(labels)
        return (x, y) if self.sample_weight is None else (x, y, columns[self.sample_weight])


def _examples(records: tf.Tensor, features: Mapping[str, Any]) -> dict[str, Any]:
    """The features of serialized `tf.train.Example`s, `[n]`."""
    raw, specs = {}, {}
    for name, feature in features.items():
        # Features of tf.io are named tuples.
        if not isinstance(feature, (str, tf.DType)) and type(feature) not in (tuple, list):
            specs[name] = feature
            continue
        kind, shape = (feature, ()) if isinstance(feature, (str, tf.DType)) else feature
        dtype = _dtype(f"features.{name}", kind)
        if dtype not in (tf.float32, tf.int64, tf.string):
            raw[name] = dtype, shape
        is_raw = name in raw
        specs[name] = tf.io.FixedLenFeature([] if is_raw else shape, tf.string if is_raw else dtype)
    columns = tf.io.parse_example(records, specs)
    for name, (dtype, shape) in raw.items():
        columns[name] = tf.reshape(tf.io.decode_raw(columns[name], dtype), [-1, *shape])
    return columns


@dataclass(frozen=True)
class Files:
    """The data that `files` returns: records in files, numbered in the order of the files.

    Attributes:
        places: the files.
        steps: functions that make a batch for Keras of the records of a batch, one after the other.
    """

    places: tuple[str, ...]
    file_format: FileFormat
    steps: tuple[Callable[..., Any], ...]
    shuffle_records: int

    @cached_property
    def blocks(self) -> list[list[Block]]:
        """The blocks of each file, which is read for this, or its metadata.

        Raises:
            ConfigError: a file cannot be read, or there is no record.
        """
        found = []
        for place in self.places:
            try:
                if not is_url(place):
                    self.file_format.check(Path(place))
                with opened(place, decompress=True) as file:
                    is_whole = place.endswith(GZIP)
                    blocks = self.file_format.blocks(file)
            except (OSError, EOFError, zlib.error, UnreadableSplit) as error:
                raise ConfigError(f"{place}: cannot be read: {error}") from error
            found.append([whole(sum(block.num_records for block in blocks))] if is_whole else blocks)
        if not any(block.num_records for blocks in found for block in blocks):
            raise ConfigError(f"{self.places[0]}: has no record" + (", as all other files" if found[1:] else ""))
        if any(block.begin < 0 for blocks in found for block in blocks):
            if is_url(self.places[0]):
                raise ConfigError(
                    f"{self.places[0]}: can only be read as a whole, and so not from a URL; decompress it"
                )
            return [[whole(sum(block.num_records for block in blocks))] for blocks in found]
        return found

    @cached_property
    def num_records(self) -> int:
        return sum(block.num_records for blocks in self.blocks for block in blocks)

    def map(self, function: Callable[..., Any]) -> Files:
        """The same, with another function that makes batches of batches."""
        return replace(self, steps=(*self.steps, function))

    def fingerprint(self) -> str:
        names = [os.path.basename(place) for place in self.places]
        sizes = [[block.num_records for block in blocks] for blocks in self.blocks]
        return (
            f"{self.num_records} records in {len(names)} files, {zlib.crc32(json.dumps([names, sizes]).encode()):08x}"
        )

    def dataset(self, batch_size: int) -> tf.data.Dataset:
        """All records in their order."""
        batches = self.read(tf.constant(0, tf.int64), tf.constant(self.num_records, tf.int64), batch_size)
        return batches.apply(tf.data.experimental.assert_cardinality(-(-self.num_records // batch_size)))

    def read(
        self,
        begin: tf.Tensor,
        end: tf.Tensor,
        batch_size: int,
        *,
        num_read: tf.Tensor | int = 0,
        seed: tuple[int, tf.Tensor] | None = None,
        are_full: bool = False,
    ) -> tf.data.Dataset:
        """The batches of a range of the records of an epoch; traced for the workers.

        Args:
            begin, end: the range, int64 `[]`.
            num_read: records of the range that were read before; int64 `[]`.
            seed: a seed, and the number of the epoch, int64 `[]`; None for the order of the files.
            are_full: all batches have `batch_size` records.
        """
        # This process may be a worker.
        offer_readers()
        num_read = tf.cast(num_read, tf.int64)
        if seed is None:
            records = self._records(begin + num_read, end, None)
        else:
            # Not of whole batches: a resumed run may have others.
            window, (number, epoch) = self.shuffle_records, seed
            left_out = num_read % window
            first = begin + num_read - left_out

            def shuffled(place: tf.Tensor, records: Any) -> Any:
                size = tf.shape(tf.nest.flatten(records)[0], out_type=tf.int64)[0]
                of_window = tf.stack([number + 1, epoch * self.num_records + first + place * window])
                order = tf.random.experimental.stateless_shuffle(tf.range(size), of_window)
                order = order[tf.where(place == 0, left_out, 0) :]
                return tf.nest.map_structure(lambda column: tf.gather(column, order), records)

            records = self._records(first, end, seed).rebatch(window).enumerate().map(shuffled).prefetch(1)
        batches = records.rebatch(batch_size, drop_remainder=are_full)
        for step in self.steps:
            batches = batches.map(step, tf.data.AUTOTUNE)
        # To optimize a dataset takes longer than what it saves in a range.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        return batches.with_options(options)

    def _records(self, begin: tf.Tensor, end: tf.Tensor, seed: tuple[int, tf.Tensor] | None) -> tf.data.Dataset:
        """The records of a range, in batches of any size."""
        numbers = np.array([len(blocks) for blocks in self.blocks], np.int64)
        all_blocks = np.array([block for blocks in self.blocks for block in blocks], np.int64).reshape(-1, 3)
        file_of = np.repeat(np.arange(len(numbers)), numbers)
        order = tf.range(len(all_blocks))
        if seed is not None:
            # The blocks of a file stay together: they are read one after the other.
            ranks = tf.random.experimental.stateless_shuffle(tf.range(len(numbers)), tf.stack([seed[0], seed[1]]))
            order = tf.argsort(tf.gather(ranks, file_of), stable=True)
        blocks, places = tf.gather(all_blocks, order), tf.gather(list(self.places), tf.gather(file_of, order))
        ends = tf.cumsum(blocks[:, 0])
        begins = ends - blocks[:, 0]
        chosen = tf.logical_and(ends > begin, begins < end)
        # Of each block, from one record to another.
        starts, stops = tf.maximum(begin - begins, 0), tf.minimum(end - begins, blocks[:, 0])
        pieces = tf.data.Dataset.from_tensor_slices((places[chosen], blocks[chosen], starts[chosen], stops[chosen]))
        if all_blocks.min() < 0:
            return pieces.flat_map(self._part_of_file)

        def part_of_block(place: tf.Tensor, block: tf.Tensor, start: tf.Tensor, stop: tf.Tensor) -> Any:
            return tf.nest.map_structure(lambda column: column[start:stop], self.file_format.read(place, block))

        return pieces.map(part_of_block).prefetch(1)

    def _part_of_file(self, place: tf.Tensor, _: tf.Tensor, start: tf.Tensor, stop: tf.Tensor) -> tf.data.Dataset:
        """The records from `start` to `stop` of a file that is read from its beginning, in batches."""

        def cut(first: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
            return first + _CHUNK, tf.nest.map_structure(lambda column: column[: tf.maximum(stop - first, 0)], batch)

        return self.file_format.batches(place, start, _CHUNK).scan(start, cut)


class FileData(TrainingData):
    """Files of records. Asynchronous workers take turns with ranges of an epoch; others have equal ones of each."""

    calls_user_code = True
    splits: RangeQueue | None

    def __init__(self, source: Files, batch_size: int, *, shuffle: bool, seed: int, readers: Readers) -> None:
        self._files, self._batch_size = source, batch_size
        self._seed = seed if shuffle else None
        if readers.serve and readers.number > 1 and readers.replicas == 1:
            self.splits = RangeQueue(source.num_records, readers.number, batch_size)

    def fingerprint(self) -> str:
        return self._files.fingerprint()

    def batches_per_pass(self, num_workers: int) -> int:
        if self.splits is not None:
            return -(-self._files.num_records // self._batch_size)
        return self._batches_of_worker(num_workers) * self._num_parts(num_workers)

    def share_end(self, share: int, num_shares: int, num_passes: int) -> int | None:
        is_shared = self.splits is None and self._num_parts(num_shares) == num_shares
        return num_passes * self._batches_of_worker(num_shares) if is_shared else None

    def _num_parts(self, num_workers: int) -> int:
        """The number of parts of an epoch; with fewer records than workers, all of them read everything."""
        return num_workers if num_workers <= self._files.num_records else 1

    def _batches_of_worker(self, num_workers: int) -> int:
        return -(-self._files.num_records // (self._num_parts(num_workers) * self._batch_size))

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return [] if self.splits is None else [tf.TensorSpec([4], tf.int64)]

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        if self.splits is None:
            return []
        split = self.splits.assign(worker_index)
        return [argument_for_task([*self.splits.range_of(split), split.num_read], tf.int64)]

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        if arguments:
            epoch, begin, end, num_read = tf.unstack(arguments[0])
            seed = None if self._seed is None else (self._seed, epoch)
            return self._files.read(begin, end, self._batch_size, num_read=num_read, seed=seed)
        num_records, num_parts = self._files.num_records, self._num_parts(context.num_workers)
        part = tf.cast(context.worker_index, tf.int64) if num_parts > 1 else tf.constant(0, tf.int64)
        begin, end = part * num_records // num_parts, (part + 1) * num_records // num_parts
        num_batches = self._batches_of_worker(context.num_workers)
        first_epoch, place = tf.cast(context.first_batch, tf.int64) // num_batches, context.first_batch % num_batches
        # Models for batches of one size need to know it.
        are_full = num_records % (num_parts * self._batch_size) == 0
        # Some workers have no record for the last batch of an epoch, which others have: it takes their first one.
        is_short = num_records // num_parts <= (num_batches - 1) * self._batch_size

        def one_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            seed = None if self._seed is None else (self._seed, epoch)
            first = tf.where(epoch == first_epoch, tf.cast(place, tf.int64), 0)
            num_read = first * self._batch_size
            batches = self._files.read(begin, end, self._batch_size, num_read=num_read, seed=seed, are_full=are_full)
            if is_short:
                again = self._files.read(begin, begin + 1, self._batch_size, seed=seed)
                batches = batches.concatenate(again).take(num_batches - first)
            return batches

        return tf.data.Dataset.range(first_epoch, tf.int64.max).flat_map(one_epoch)


class RangeQueue(Splits):
    """Hands out ranges of the records of an epoch; those of the next epoch when all of them were read.

    They become smaller towards the end of an epoch, so that all workers end at the same time (guided self-scheduling,
    Polychronopoulos and Kuck, 1987). A range is a split called `epoch 0, records 0 to 640`.
    """

    place = "the files"
    have_lengths = True

    def __init__(self, num_records: int, num_workers: int, batch_size: int) -> None:
        super().__init__(batch_size)
        self._num_records, self._num_workers = num_records, num_workers
        #: The present epoch; True if its ranges were found.
        self._epoch, self._is_found = 0, False

    @staticmethod
    def range_of(split: Split) -> tuple[int, int, int]:
        """The number of the epoch, and the first record and the end of a range."""
        epoch, begin, end = map(int, re.findall(r"\d+", split.name))
        return epoch, begin, end

    def look(self) -> bool:
        with self._changed:
            if self._is_found and not self._unread:
                self._epoch, self._is_found = self._epoch + 1, False
            if not self._is_found:
                self._is_found = True
                self._waiting.extend(map(Split, self._ranges()))
            return bool(self._waiting)

    def batches_left(self, worker: int) -> int | None:
        with self._changed:
            split = self.split_of(worker)
            if split is None:
                return None
            _, begin, end = self.range_of(split)
            return max(0, -(-(end - begin - split.num_read) // self._batch_size))

    def state(self) -> str:
        with self._changed:
            return self._dump([self._epoch, self._is_found])

    def restore(self, state: str | None) -> None:
        decoded = json.loads(state) if state else {}
        with self._changed:
            self._epoch, self._is_found = decoded.get("found", [0, False])
            self._wait_with(decoded.get("unread", ()))

    def _ranges(self) -> Iterator[str]:
        begin, left = 0, -(-self._num_records // self._batch_size)
        while left:
            size = max(_FEWEST_BATCHES, left // (2 * self._num_workers))
            # Whole calls, of as many steps as they can have.
            size = min(left, size - size % _STEPS_OF_CALLS if size > _STEPS_OF_CALLS else size)
            end = min(self._num_records, begin + size * self._batch_size)
            yield f"epoch {self._epoch}, records {begin} to {end}"
            begin, left = end, left - size
