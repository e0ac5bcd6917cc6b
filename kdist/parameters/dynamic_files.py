"""The rows of a group of dynamic tables, and how they are saved, restored and read.

In a checkpoint, each table has tensors with one row for each id, in one order: of ids, of vectors, of slots, of counts.
Every server writes its own rows, as slices of these tensors, a few at a time. To restore, every server reads the ids,
and then the rows of its own ids, so that the number of servers does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.model.names import dynamic_names
from kdist.parameters.dynamic_table import DynamicTable
from kdist.parameters.growing import growing_variable, open_shape, set_value
from kdist.parameters.named_values import NamedValues

#: Columns that are neither saved nor read: they say where a row belongs.
_HIDDEN = "tables"


@dataclass(frozen=True)
class Rows:
    """The rows of a table on a server, or a copy of them.

    Attributes:
        columns: variables by name, each `[capacity, ...]`.
        num_rows: int64: of `capacity`.
    """

    device: str
    columns: Mapping[str, tf.Variable]
    num_rows: tf.Variable

    @staticmethod
    def of(table: DynamicTable) -> Rows:
        columns = {name: column.variable for name, column in table.columns.items()}
        return Rows(table.device, columns, table.num_rows)

    @property
    def row_bytes(self) -> int:
        return sum(prod(column.shape[1:]) * column.dtype.size for column in self.columns.values())

    def copied(self) -> tuple[Rows, Callable[[], None], Callable[[], None]]:
        """An empty copy; what fills it, and what gives its memory back; both traced."""
        with tf.device(self.device):
            columns = {name: growing_variable(column.shape[1:], column.dtype) for name, column in self.columns.items()}
            num_rows = tf.Variable(tf.zeros([], tf.int64), trainable=False)

        def fill() -> None:
            with tf.device(self.device):
                used = tf.range(num_rows.assign(self.num_rows.read_value()))
                for name, column in self.columns.items():
                    set_value(columns[name], column.sparse_read(used))

        def release() -> None:
            with tf.device(self.device):
                for column in columns.values():
                    set_value(column, tf.zeros([0, *column.shape[1:]], column.dtype))

        return Rows(self.device, columns, num_rows), fill, release


@dataclass(frozen=True)
class Saving:
    """What is to be written, and may be by another thread.

    Attributes:
        files: the names of the files.
        calls: each writes some of them.
    """

    files: Sequence[str]
    calls: Sequence[Callable[[], object]]


class DynamicFiles:
    """Saves, restores and reads the tables of a group.

    Args:
        tables: of the servers.
        names: of the vectors of each table of the group, without `parameters/`.
        chief: the device of this process.
    """

    def __init__(self, tables: Sequence[DynamicTable], names: Sequence[str], chief: str) -> None:
        self.tables = tables
        self.rows = [Rows.of(table) for table in tables]
        self.names = [dynamic_names(name, [c for c in tables[0].columns if c != _HIDDEN]) for name in names]
        self.chunk = max(1, NamedValues.piece_bytes // self.rows[0].row_bytes)
        self.through_chief = False
        self._chief = chief
        self._functions: dict[Any, Callable[..., Any]] = {}

    @property
    def shapes(self) -> dict[str, tuple[Any, ...]]:
        columns = self.rows[0].columns
        return {name: tuple(open_shape(columns[c])) for names in self.names for c, name in names.items()}

    def counts(self, rows: Rows) -> np.ndarray:
        """How many rows each chunk has of each table: int64 `[chunks, tables]`."""
        num_tables = len(self.names)

        def count() -> tf.Tensor:
            with tf.device(rows.device):
                used = tf.range(rows.num_rows.read_value())
                tables = tf.cast(rows.columns[_HIDDEN].sparse_read(used), tf.int64)
                where = tf.boolean_mask(used // self.chunk * num_tables + tables, tables >= 0)
                num_chunks = (tf.size(used, tf.int64) + self.chunk - 1) // self.chunk
                return tf.math.bincount(tf.cast(where, tf.int32), minlength=tf.cast(num_chunks, tf.int32) * num_tables)

        return self._traced(("count", id(rows)), count)().numpy().reshape(-1, num_tables)

    def saving(self, folder: str, label: str, all_rows: Sequence[Rows]) -> Saving:
        """What writes the rows of all servers into a folder; traces the functions that do."""
        counts = [self.counts(rows) for rows in all_rows]
        totals = sum(of_server.sum(0) for of_server in counts)
        files, calls = list[str](), list[Callable[[], object]]()
        end = np.zeros(len(self.names), np.int64)
        for server, (rows, of_server) in enumerate(zip(all_rows, counts)):
            for chunk, of_chunk in enumerate(of_server):
                present = tuple(np.flatnonzero(of_chunk).tolist())
                if not present:
                    continue
                function = self._traced(
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

    def restore(self, path: str) -> None:
        """Replaces all rows by those of a checkpoint."""
        self._traced("clear", self._clear)()
        shapes = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        columns = list(self.names[0])
        load = self._traced(
            "load",
            self._load,
            tf.TensorSpec([], tf.string),
            tf.TensorSpec([len(columns)], tf.string),
            tf.TensorSpec([], tf.int32),
            *[tf.TensorSpec([], tf.int64)] * 3,
        )
        for table, names in enumerate(self.names):
            total = shapes[names["ids"]][0]
            for start in range(0, total, self.chunk):
                place = (np.int64(number) for number in (total, start, min(self.chunk, total - start)))
                arguments = path, [names[column] for column in columns], np.int32(table), *place
                load(*map(tf.constant, arguments))

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers have."""
        put = None
        for table, layer in enumerate(self.tables[0].layers):
            ids, vectors = layer.ids, layer.rows
            put = put or self._traced(
                "put",
                self._put,
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, *vectors.shape[1:]], vectors.dtype),
                tf.TensorSpec([], tf.int32),
            )
            for start in range(0, len(ids), self.chunk):
                part = slice(start, start + self.chunk)
                put(*map(tf.constant, (np.int32(table), ids[part], vectors[part], np.int32(step))))

    def read(self, wanted: Collection[str]) -> Iterator[dict[str, np.ndarray]]:
        """Columns of tables, by their names in checkpoints, table by table."""
        for table, names in enumerate(self.names):
            own = {column: name for column, name in names.items() if name in wanted}
            if not own:
                continue
            parts: dict[str, list[np.ndarray]] = {name: [] for name in own.values()}
            for rows in self.rows:
                function = self._traced(
                    ("read", id(rows), tuple(own)),
                    partial(self._read, rows, list(own)),
                    tf.TensorSpec([], tf.int32),
                    tf.TensorSpec([], tf.int64),
                )
                for start in range(0, int(rows.num_rows.numpy()), self.chunk):
                    found = function(tf.constant(table), tf.constant(start, tf.int64))
                    for name, tensor in zip(own.values(), found):
                        parts[name].append(tensor.numpy())
            empty = {
                name: np.zeros((0, *self.shapes[name][1:]), self._dtype_of(column)) for column, name in own.items()
            }
            yield {name: np.concatenate([empty[name], *of_name]) for name, of_name in parts.items()}

    def not_finite(self, all_rows: Sequence[Rows]) -> list[str]:
        """The names of floating-point columns that have NaN or infinity; of a group with many tables, of all."""
        broken: set[str] = set()
        for rows in all_rows:
            floats = [name for name, column in rows.columns.items() if column.dtype.is_floating]
            check = self._traced(("check", id(rows)), partial(self._are_finite, rows, floats))
            broken |= {name for name, is_finite in zip(floats, check().numpy()) if not is_finite}
        return [name for names in self.names for column, name in names.items() if column in broken]

    def _dtype_of(self, column: str) -> Any:
        return self.rows[0].columns[column].dtype.as_numpy_dtype

    def _traced(self, key: Any, function: Callable[..., Any], *specs: tf.TensorSpec) -> Callable[..., Any]:
        if key not in self._functions:
            self._functions[key] = tf.function(function, autograph=False).get_concrete_function(*specs)
        return self._functions[key]

    def _writer_of(self, device: str) -> str:
        return self._chief if self.through_chief else device

    def _rows_of(self, rows: Rows, start: tf.Tensor, table: Any) -> tf.Tensor:
        """The rows of a table among those of a chunk, int64 `[n]`."""
        of_chunk = tf.range(start, tf.minimum(start + self.chunk, rows.num_rows.read_value()))
        return tf.boolean_mask(of_chunk, tf.equal(rows.columns[_HIDDEN].sparse_read(of_chunk), table))

    def _save(
        self, rows: Rows, present: Sequence[int], prefix: tf.Tensor, start: tf.Tensor, places: tf.Tensor
    ) -> tf.Tensor:
        """Writes a chunk; `places` says of each table how many rows there are in all, and where these begin."""
        names, specs, tensors = list[str](), list[tf.Tensor](), list[tf.Tensor]()
        with tf.device(rows.device):
            for number, table in enumerate(present):
                chosen = self._rows_of(rows, start, int(table))
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
        columns = self.rows[0].columns
        named = [(columns[column], name) for table in tables for column, name in self.names[table].items()]
        with tf.device(self._chief):
            tf.raw_ops.SaveV2(
                prefix=prefix,
                tensor_names=[name for _, name in named],
                shape_and_slices=[""] * len(named),
                tensors=[tf.zeros([0, *column.shape[1:]], column.dtype) for column, _ in named],
            )

    def _clear(self) -> None:
        for table in self.tables:
            with tf.device(table.device):
                table.clear()

    def _load(
        self, path: tf.Tensor, names: tf.Tensor, table: tf.Tensor, total: tf.Tensor, start: tf.Tensor, count: tf.Tensor
    ) -> None:
        """Lets every server read a chunk of a table, and keep the rows of its ids."""
        columns = self.rows[0].columns
        dtypes = {column: columns[column].dtype for column in self.names[0]}
        specs = {c: _slice_spec(columns[c].shape[1:], total, start, count) for c in dtypes}
        ids_at = list(dtypes).index("ids")
        for server in self.tables:
            with tf.device(self._writer_of(server.device)):
                (ids,) = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=names[ids_at : ids_at + 1],
                    shape_and_slices=tf.stack([specs["ids"]]),
                    dtypes=[tf.int64],
                )
                ids = tf.ensure_shape(ids, [None])

            def load(server: DynamicTable = server, ids: tf.Tensor = ids) -> tf.Tensor:
                with tf.device(self._writer_of(server.device)):
                    read = tf.raw_ops.RestoreV2(
                        prefix=path,
                        tensor_names=names,
                        shape_and_slices=tf.stack(list(specs.values())),
                        dtypes=list(dtypes.values()),
                    )
                with tf.device(server.device):
                    is_own = server.keys_here(ids, table)
                    values = {
                        column: tf.boolean_mask(tf.ensure_shape(of_column, open_shape(columns[column])), is_own)
                        for column, of_column in zip(dtypes, read)
                    }
                    server.put(tf.fill(tf.shape(values["ids"]), table), values)
                    return tf.constant(True)

            if self.through_chief:
                load()
                continue
            with tf.device(server.device):
                tf.cond(tf.reduce_any(server.keys_here(ids, table)), load, lambda: False)

    def _put(self, table: tf.Tensor, ids: tf.Tensor, vectors: tf.Tensor, step: tf.Tensor) -> None:
        for server in self.tables:
            with tf.device(server.device):
                is_own = server.keys_here(tf.identity(ids), table)
                own = tf.boolean_mask(ids, is_own)
                tables = tf.fill(tf.shape(own), table)
                values = {"ids": own, "vectors": tf.boolean_mask(vectors, is_own)}
                server.put(tables, {**values, "last_steps": tf.fill(tf.shape(own), step)})

    def _read(self, rows: Rows, columns: Sequence[str], table: tf.Tensor, start: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(rows.device):
            chosen = self._rows_of(rows, start, table)
            return [rows.columns[column].sparse_read(chosen) for column in columns]

    def _are_finite(self, rows: Rows, columns: Sequence[str]) -> tf.Tensor:
        def check(start: tf.Tensor, flags: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            stop = tf.minimum(start + self.chunk, num_rows)
            values = [rows.columns[column].sparse_read(tf.range(start, stop)) for column in columns]
            return stop, flags & tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values])

        with tf.device(rows.device):
            num_rows = rows.num_rows.read_value()
            initial = [tf.zeros([], tf.int64), tf.ones([len(columns)], tf.bool)]
            return tf.while_loop(lambda start, _: start < num_rows, check, initial, parallel_iterations=1)[1]


def _slice_spec(row_shape: Any, total: tf.Tensor, start: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Some rows of a tensor as TensorFlow's ops for checkpoints take them."""
    shape = tf.strings.as_string(tf.stack([total, *(tf.constant(size, tf.int64) for size in row_shape)]))
    rows = tf.strings.join([tf.strings.as_string(start), ",", tf.strings.as_string(count)])
    return tf.strings.join([tf.strings.reduce_join(shape, separator=" "), " ", rows, ":-" * len(row_shape)])
