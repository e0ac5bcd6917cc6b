"""`RowFiles`: servers write rows as slices of tensors whose length only the chief knows, and read theirs.

Each table has tensors with one row for each id, in one order: of ids, of vectors, of slots. First the chief asks every
server how many rows of each table it has; then every server writes its own, a few at a time. To read them, every server
reads the ids, and then the rows of those that it takes, so that the number of servers does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.tables.resizable_variable import resizable_variable, set_value
from kdist.parameters.tensorflow_paths import open_checkpoint

#: The column that says which table of its group a row belongs to, -1 for none; and the one that identifies it there.
TABLES, IDS = "tables", "ids"


@dataclass(frozen=True)
class Rows:
    """The rows of a server, or a copy of them.

    Attributes:
        columns: variables by name, each `[capacity, ...]`, `tables` among them.
        num_rows: int64: of `capacity`.
    """

    device: str
    columns: Mapping[str, tf.Variable]
    num_rows: tf.Variable


class Source(Protocol):
    """Rows on a server, of which some are to be copied."""

    device: str

    @property
    def columns(self) -> Mapping[str, tf.Variable]:
        """Variables by name, each `[capacity, ...]`."""

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        """The rows that are to be copied, int64 `[n]`; traced. `since` is what `Copies.fill` was called with."""

    def placed(self, rows: tf.Tensor) -> Mapping[str, tf.Tensor]:
        """Columns that are not in variables: `ids`, int64 `[n]`, and `tables`, int32 `[n]`; traced."""


class Receiver(Protocol):
    """What takes rows from files, on a server."""

    device: str

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """Which ids of a table, int64 `[n]`, it takes: bool `[n]`; traced."""

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        """Takes rows of a table, by column; traced."""


class Copies:
    """Copies of rows, each on the server of its source; empty at first.

    Attributes:
        rows: the copies.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self.rows = [self._empty(source) for source in sources]
        self._fill = tf.function(self._copy_all, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
        self._release = tf.function(self._release_all, autograph=False).get_concrete_function()

    def fill(self, since: int = 0) -> None:
        """Copies the rows that every source chooses; `since` as in `Source.chosen`."""
        self._fill(tf.constant(since, tf.int32))

    def release(self) -> None:
        """Gives the memory of the copies back."""
        self._release()

    @staticmethod
    def _empty(source: Source) -> Rows:
        specs = {name: (column.shape[1:], column.dtype) for name, column in source.columns.items()}
        specs = {IDS: ((), tf.int64), TABLES: ((), tf.int32), **specs}
        with tf.device(source.device):
            columns = {name: resizable_variable(*spec) for name, spec in specs.items()}
            return Rows(source.device, columns, tf.Variable(tf.zeros([], tf.int64), trainable=False))

    def _copy_all(self, since: tf.Tensor) -> None:
        for source, copy in zip(self._sources, self.rows):
            with tf.device(source.device):
                chosen = source.chosen(since)
                values = {name: column.sparse_read(chosen) for name, column in source.columns.items()}
                for name, value in {**values, **source.placed(chosen)}.items():
                    set_value(copy.columns[name], value)
                copy.num_rows.assign(tf.size(chosen, tf.int64))

    def _release_all(self) -> None:
        for copy in self.rows:
            with tf.device(copy.device):
                for column in copy.columns.values():
                    set_value(column, tf.zeros([0, *column.shape[1:]], column.dtype))


@dataclass(frozen=True)
class Saving:
    """What is to be written, and may be by another thread.

    Attributes:
        files: the names of the files.
        calls: each writes some of them.
    """

    files: Sequence[str]
    calls: Sequence[Callable[[], object]]

    @staticmethod
    def all_of(savings: Sequence[Saving]) -> Saving:
        return Saving([f for saving in savings for f in saving.files], [c for saving in savings for c in saving.calls])


class RowFiles:
    """Writes and reads the rows of a group of tables.

    Args:
        names: for each table the tensors of its columns, by column; `ids` is one of them.
        columns: the dtype of each column, and its shape, in which the first number means nothing.
        chief: the device of this process.

    Attributes:
        chunk: how many rows a server writes or reads at once.
        through_chief: whether this process reads and writes the files, because the servers do not see them.
    """

    def __init__(self, names: Sequence[Mapping[str, str]], columns: Mapping[str, Any], chief: str) -> None:
        self.names = names
        row_bytes = sum(prod(column.shape[1:]) * column.dtype.size for column in columns.values())
        self.chunk = max(1, StoredShard.slice_bytes // row_bytes)
        self.through_chief = False
        self._columns = columns
        self._chief = chief
        self._functions: dict[Any, Callable[..., Any]] = {}

    def saving(self, folder: str, label: str, all_rows: Sequence[Rows]) -> Saving:
        """What writes the rows of all servers into a folder; traces the functions that do."""
        counts = [self._counts(rows) for rows in all_rows]
        totals = sum(of_server.sum(0) for of_server in counts)
        files, calls = list[str](), list[Callable[[], object]]()
        end = np.zeros(len(self.names), np.int64)
        for server, (rows, of_server) in enumerate(zip(all_rows, counts)):
            for chunk, of_chunk in enumerate(of_server):
                present = tuple(np.flatnonzero(of_chunk).tolist())
                if not present:
                    continue
                function = self.traced(
                    ("save", id(rows), present),
                    partial(self._save, rows, present),
                    tf.TensorSpec([], tf.string),
                    tf.TensorSpec([], tf.int64),
                    tf.TensorSpec([None, 2], tf.int64),
                )
                files.append(f"{label}-{server}-{chunk}")
                where = np.stack([totals, end], 1)[list(present)]
                arguments = f"{folder}/{files[-1]}", np.int64(chunk * self.chunk), where
                calls.append(partial(function, *map(tf.constant, arguments)))
                end = end + of_chunk
        empty = [table for table, total in enumerate(np.broadcast_to(totals, [len(self.names)])) if not total]
        if empty:
            files.append(f"{label}-empty")
            calls.append(partial(self._save_empty, f"{folder}/{files[-1]}", empty))
        return Saving(files, calls)

    def load(self, path: str, receivers: Sequence[Receiver]) -> None:
        """Lets every receiver take its rows from a checkpoint."""
        shapes = open_checkpoint(Path(path)).get_variable_to_shape_map()
        columns = list(self.names[0])
        load = self.traced(
            "load",
            partial(self._load, receivers),
            tf.TensorSpec([], tf.string),
            tf.TensorSpec([len(columns)], tf.string),
            tf.TensorSpec([], tf.int32),
            *[tf.TensorSpec([], tf.int64)] * 3,
        )
        for table, names in enumerate(self.names):
            if names[IDS] not in shapes:
                raise tf.errors.NotFoundError(None, None, f"{path} has no {names[IDS]}")
            total = shapes[names[IDS]][0]
            for start in range(0, total, self.chunk):
                place = (np.int64(number) for number in (total, start, min(self.chunk, total - start)))
                arguments = path, [names[column] for column in columns], np.int32(table), *place
                load(*map(tf.constant, arguments))

    def not_finite(self, all_rows: Sequence[Rows]) -> list[str]:
        """The names of floating-point columns that have NaN or infinity; of a group with many tables, of all."""
        broken: set[str] = set()
        for rows in all_rows:
            if floats := [name for name, column in rows.columns.items() if column.dtype.is_floating]:
                check = self.traced(("check", id(rows)), partial(self._are_finite, rows, floats))
                broken |= {name for name, is_finite in zip(floats, check().numpy()) if not is_finite}
        return [name for names in self.names for column, name in names.items() if column in broken]

    def traced(self, key: Any, function: Callable[..., Any], *specs: tf.TensorSpec) -> Callable[..., Any]:
        """A function, traced when it is first asked for."""
        if key not in self._functions:
            self._functions[key] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._functions[key]

    def rows_of(self, rows: Rows, start: tf.Tensor, table: Any) -> tf.Tensor:
        """The rows of a table among those of a chunk, int64 `[n]`; traced."""
        of_chunk = tf.range(start, tf.minimum(start + self.chunk, rows.num_rows.read_value()))
        return tf.boolean_mask(of_chunk, tf.equal(rows.columns[TABLES].sparse_read(of_chunk), table))

    def _counts(self, rows: Rows) -> np.ndarray:
        """How many rows each chunk has of each table: int64 `[chunks, tables]`."""
        num_tables = len(self.names)

        def count() -> tf.Tensor:
            with tf.device(rows.device):
                used = tf.range(rows.num_rows.read_value())
                tables = tf.cast(rows.columns[TABLES].sparse_read(used), tf.int64)
                where = tf.boolean_mask(used // self.chunk * num_tables + tables, tables >= 0)
                num_chunks = (tf.size(used, tf.int64) + self.chunk - 1) // self.chunk
                return tf.math.bincount(tf.cast(where, tf.int32), minlength=tf.cast(num_chunks, tf.int32) * num_tables)

        return self.traced(("count", id(rows)), count)().numpy().reshape(-1, num_tables)

    def _writer_of(self, device: str) -> str:
        return self._chief if self.through_chief else device

    def _save(
        self, rows: Rows, present: Sequence[int], prefix: tf.Tensor, start: tf.Tensor, places: tf.Tensor
    ) -> tf.Tensor:
        """Writes a chunk; `places` says of each table how many rows there are in all, and where these begin."""
        names, specs, tensors = list[str](), list[tf.Tensor](), list[tf.Tensor]()
        with tf.device(rows.device):
            for number, table in enumerate(present):
                chosen = self.rows_of(rows, start, int(table))
                total, first = places[number, 0], places[number, 1]
                for column, name in self.names[table].items():
                    variable = rows.columns[column]
                    names.append(name)
                    specs.append(_slice_spec(variable.shape[1:], total, first, tf.size(chosen)))
                    tensors.append(variable.sparse_read(chosen))
        with tf.device(self._writer_of(rows.device)):
            saved = tf.raw_ops.SaveV2(
                prefix=prefix, tensor_names=names, shape_and_slices=tf.stack(specs), tensors=tensors
            )
        with tf.control_dependencies([saved]), tf.device(self._chief):
            return tf.constant(True)

    def _save_empty(self, prefix: str, tables: Sequence[int]) -> None:
        named = [(self._columns[column], name) for table in tables for column, name in self.names[table].items()]
        with tf.device(self._chief):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=[name for _, name in named],
                shape_and_slices=[""] * len(named),
                tensors=[tf.zeros([0, *column.shape[1:]], column.dtype) for column, _ in named],
            )

    def _load(
        self,
        receivers: Sequence[Receiver],
        path: tf.Tensor,
        names: tf.Tensor,
        table: tf.Tensor,
        total: tf.Tensor,
        start: tf.Tensor,
        count: tf.Tensor,
    ) -> None:
        """Lets every receiver read a chunk of a table, and take the rows of its ids."""
        columns = self._columns
        dtypes = {column: columns[column].dtype for column in self.names[0]}
        specs = {c: _slice_spec(columns[c].shape[1:], total, start, count) for c in dtypes}
        ids_at = list(dtypes).index(IDS)
        for receiver in receivers:
            with tf.device(self._writer_of(receiver.device)):
                (ids,) = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=names[ids_at : ids_at + 1],
                    shape_and_slices=tf.stack([specs[IDS]]),
                    dtypes=[tf.int64],
                )
                ids = tf.ensure_shape(ids, [None])

            def load(receiver: Receiver = receiver, ids: tf.Tensor = ids) -> tf.Tensor:
                with tf.device(self._writer_of(receiver.device)):
                    read = tf.raw_ops.RestoreV2(
                        prefix=path,
                        tensor_names=names,
                        shape_and_slices=tf.stack(list(specs.values())),
                        dtypes=list(dtypes.values()),
                    )
                with tf.device(receiver.device):
                    is_own = receiver.keys_here(ids, table)
                    values = {
                        column: tf.boolean_mask(tf.ensure_shape(of_column, [None, *columns[column].shape[1:]]), is_own)
                        for column, of_column in zip(dtypes, read)
                    }
                    receiver.take(table, values)
                    return tf.constant(True)

            if self.through_chief:
                load()
                continue
            with tf.device(receiver.device):
                tf.cond(tf.reduce_any(receiver.keys_here(ids, table)), load, lambda: False)

    def _are_finite(self, rows: Rows, columns: Sequence[str]) -> tf.Tensor:
        def check(start: tf.Tensor, flags: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            stop = tf.minimum(start + self.chunk, num_rows)
            values = [rows.columns[column].sparse_read(tf.range(start, stop)) for column in columns]
            return stop, flags & tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

        with tf.device(rows.device):
            num_rows = rows.num_rows.read_value()
            initial = [tf.zeros([], tf.int64), tf.ones([len(columns)], tf.bool)]
            return tf.while_loop(lambda start, _: start < num_rows, check, initial, parallel_iterations=1)[1]


def chief_device() -> str:
    """The device of this process by its full name, since each task has a CPU."""
    with tf.device("CPU:0"):
        return tf.zeros([]).device


def _slice_spec(row_shape: Any, total: tf.Tensor, start: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Some rows of a tensor as TensorFlow's ops for checkpoints take them."""
    shape = tf.strings.as_string(tf.stack([total, *(tf.constant(size, tf.int64) for size in row_shape)]))
    rows = tf.strings.join([tf.strings.as_string(start), ",", tf.strings.as_string(count)])
    return tf.strings.join([tf.strings.reduce_join(shape, separator=" "), " ", rows, ":-" * len(row_shape)])
