"""Criteo's TSV files, for the recipe `criteo`: which there are, what is in a line, how workers read them.

A line is a label, 13 counts and 26 ids, separated by tabs, without a header; counts and ids may be empty.
"""

from __future__ import annotations

import glob
import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from kdist.errors import ConfigError, reason

if TYPE_CHECKING:
    import tensorflow as tf

    from kdist.data.base import DataContext

NUM_COUNTS, NUM_IDS = 13, 26
_NUM_COLUMNS = 1 + NUM_COUNTS + NUM_IDS
# Of a file without a validation file beside it, the first of so many lines is for validation.
HELD_OUT = 20
_FILES_AT_ONCE = 8
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Rows:
    """Some rows of data.

    Attributes:
        labels: float32 [n], 0 or 1.
        counts: float32 [n, 13], whole numbers; NaN where the field is empty.
        ids: string [n, 26]; empty where the field is.
    """

    labels: tf.Tensor
    counts: tf.Tensor
    ids: tf.Tensor


#: What becomes of rows: the elements of a dataset.
Transform = Callable[[Rows], Any]


def find_files(key: str, path: str, min_lines: int) -> list[str]:
    """The files of a file, a folder or a glob, sorted; of a folder, those whose names do not begin with a dot or `_`.

    Args:
        key: the config key of `path`.
        min_lines: that each file has to have.

    Raises:
        ConfigError: there is none, or one is too short or cannot be read.
    """
    # A name with brackets is a glob, too.
    found = [Path(path)] if Path(path).exists() else [Path(name) for name in glob.glob(path)]
    if len(found) == 1 and found[0].is_dir():
        found = [file for file in found[0].iterdir() if not file.name.startswith((".", "_"))]
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise ConfigError(f"{key}={path}: no such file; expected a file, a folder or a glob of Criteo's TSV files")
    for file in files:
        try:
            with open_file(file, "rb") as lines:
                num_lines = sum(1 for _ in zip(range(min_lines), lines))
        except (OSError, EOFError) as error:
            raise ConfigError(f"{key}={path}: {file} cannot be read: {error}") from None
        if num_lines < min_lines:
            raise ConfigError(f"{key}={path}: {file} has {num_lines} lines; expected at least {min_lines}")
    # Workers may run in another folder.
    return [str(file.absolute()) for file in files]


def open_file(path: Path, mode: str) -> IO[bytes]:
    """Opens a file, compressed if its name ends with `.gz`."""
    return cast("IO[bytes]", gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode))


def reader(
    files: Sequence[str], *, holds_out: bool, shuffle_rows: int, seed: int, transform: Transform
) -> Callable[[DataContext], tf.data.Dataset]:
    """A dataset function over files: endless batches, transformed.

    With at least as many files as workers, a worker reads every n-th file; otherwise it reads all of them, and parses
    every n-th block of lines.

    Args:
        holds_out: whether to leave out the lines that are for validation.
        shuffle_rows: lines of a block; the rows of a block are shuffled.
        seed: of shuffling.
    """

    def read(context: DataContext) -> tf.data.Dataset:
        import tensorflow as tf

        is_by_file = len(files) >= context.num_workers
        numbers = tf.data.Dataset.range(len(files))
        if is_by_file:
            numbers = numbers.shard(context.num_workers, context.worker_index)
        # Repeated before it is shared out, so that everyone gets something of a short file.
        blocks = _blocks(numbers, files, shuffle_rows).repeat()
        if not is_by_file:
            blocks = blocks.shard(context.num_workers, context.worker_index)

        def training_part(count: tf.Tensor, block: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
            _, line, _ = block
            chosen = tf.where(line % HELD_OUT != 1)[:, 0] if holds_out else tf.range(tf.size(line, tf.int64))
            # A resumed run begins with the first block again, in another order.
            pair = tf.stack([tf.constant(seed, tf.int64), count + tf.cast(context.first_batch, tf.int64)])
            order = tf.random.experimental.stateless_shuffle(chosen, pair)
            return tuple(tf.gather(column, order) for column in block)

        rows = blocks.enumerate().map(training_part).rebatch(context.batch_size or 32, drop_remainder=True)
        return rows.map(lambda *lines: transform(parse(files, *lines)))

    return read


def read_rows(files: Sequence[str], *, is_held_out: bool, num_rows: int, transform: Transform) -> Any:
    """The first rows of files, transformed, as arrays.

    Args:
        is_held_out: whether to take only the lines that are for validation.
        num_rows: at most; fewer if there are not so many.

    Raises:
        ConfigError: a line is not as it should be.
    """
    import tensorflow as tf

    def chosen(file: tf.Tensor, line: tf.Tensor, text: tf.Tensor) -> tuple[tf.Tensor, ...]:
        wanted = line % HELD_OUT == 1 if is_held_out else line > 0
        return tuple(tf.boolean_mask(column, wanted) for column in (file, line, text))

    blocks = _blocks(tf.data.Dataset.range(len(files)), files, 20_000).map(chosen)
    parts = blocks.unbatch().take(num_rows).batch(10_000).map(lambda *lines: transform(parse(files, *lines)))
    try:
        found = list(parts.as_numpy_iterator())
    except tf.errors.OpError as error:
        raise ConfigError(reason(error)) from None
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *found)


def parse(files: Sequence[str], file: tf.Tensor, line: tf.Tensor, text: tf.Tensor) -> Rows:
    """Lines as rows, while a graph is traced.

    Args:
        file: int64 [n], where in `files` the file is that a line is from.
        line: int64 [n], the number of a line in its file, from 1.
        text: string [n].

    Raises:
        InvalidArgumentError: when it runs: a line has another number of columns, a label that is not 0 or 1, or a count
            that is not a whole number; names the first one.
    """
    import tensorflow as tf

    def check(is_right: tf.Tensor, wrong: Callable[[tf.Tensor], list[Any]]) -> tf.Operation:
        first = tf.argmin(tf.cast(is_right, tf.int32))
        where = [tf.gather(tf.constant(list(files)), file[first]), ", line ", tf.strings.as_string(line[first])]
        return tf.debugging.Assert(tf.reduce_all(is_right), [tf.strings.join([*where, ": ", *wrong(first)])])

    split = tf.strings.split(text, "\t")
    num_columns = split.row_lengths()
    columns_are_right = check(
        num_columns == _NUM_COLUMNS,
        lambda first: [
            tf.strings.as_string(num_columns[first]),
            f" columns: must be {_NUM_COLUMNS}, tabs between",
        ],
    )
    with tf.control_dependencies([columns_are_right]):
        fields = tf.reshape(tf.identity(split.flat_values), [-1, _NUM_COLUMNS])
    label, counts, ids = tf.split(fields, [1, NUM_COUNTS, NUM_IDS], 1)
    are_counts = tf.strings.regex_full_match(counts, r"-?\d*")
    checks = [
        check(
            tf.reduce_any(label == ["0", "1"], 1),
            lambda first: ["label=", label[first, 0], ": must be 0 or 1"],
        ),
        check(
            tf.reduce_all(are_counts, 1),
            lambda first: [
                "count=",
                counts[first, tf.argmin(tf.cast(are_counts[first], tf.int32))],
                ": must be a whole number",
            ],
        ),
    ]
    with tf.control_dependencies(checks):
        numbers = tf.strings.to_number(tf.where(counts == "", "nan", counts))
        return Rows(tf.cast(label[:, 0] == "1", tf.float32), numbers, tf.identity(ids))


def write_rows(path: Path, rows: Rows) -> None:
    """Writes a file as Criteo has it; compressed if its name ends with `.gz`."""
    labels, counts, ids = (np.asarray(column) for column in (rows.labels, rows.counts, rows.ids))
    with open_file(path, "wb") as file:
        for label, of_counts, of_ids in zip(labels, counts, ids):
            numbers = [b"" if np.isnan(count) else b"%d" % count for count in of_counts]
            file.write(b"\t".join([b"%d" % label, *numbers, *of_ids]) + b"\n")


def _blocks(numbers: tf.data.Dataset, files: Sequence[str], num_lines: int) -> tf.data.Dataset:
    """Blocks of lines of the files with these numbers, in turn: number of the file, of the line, and text, [n] each."""
    import tensorflow as tf

    def of_file(number: tf.Tensor) -> tf.data.Dataset:
        name = tf.gather(tf.constant(list(files)), number)
        compression = tf.where(tf.strings.regex_full_match(name, r".*\.gz"), "GZIP", "")
        lines = tf.data.TextLineDataset(name, compression, _READ_BYTES).batch(num_lines)

        def numbered(block: tf.Tensor, text: tf.Tensor) -> tuple[tf.Tensor, ...]:
            count = tf.range(1, tf.size(text, tf.int64) + 1)
            return tf.fill(tf.shape(text), number), block * num_lines + count, text

        return lines.enumerate().map(numbered)

    return numbers.interleave(of_file, cycle_length=min(len(files), _FILES_AT_ONCE))
