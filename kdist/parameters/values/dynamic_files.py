"""The rows of a group of dynamic tables, and how they are saved, restored and read.

In a checkpoint, each table has the tensors of `RowFiles`: of ids, of vectors, of slots, of counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.model.names import dynamic_names
from kdist.parameters.tables.dynamic_table import CHANGED, DynamicTable
from kdist.parameters.tables.resizable_variable import open_shape
from kdist.parameters.values.row_files import TABLES, RowFiles, Rows

#: Columns that are neither saved nor read: they say where a row belongs, and when it changed.
_HIDDEN = (TABLES, CHANGED)


class TableOnServer:
    """The rows of a dynamic table on a server, as the source of a copy of all of them, and as what takes rows."""

    def __init__(self, table: DynamicTable) -> None:
        self.table, self.device = table, table.device
        self.columns = {name: column.variable for name, column in table.columns.items() if name != CHANGED}
        self.rows = Rows(table.device, self.columns, table.num_rows)

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        """All rows."""
        return tf.range(self.table.num_rows.read_value())

    def placed(self, rows: tf.Tensor) -> Mapping[str, tf.Tensor]:
        return {}

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        return self.table.keys_here(ids, table)

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        self.table.put(tf.fill(tf.shape(values["ids"]), table), values)


class DynamicFiles:
    """Saves, restores and reads the tables of a group.

    Args:
        tables: of the servers.
        names: of the vectors of each table of the group, without `parameters/`.
        chief: the device of this process.

    Attributes:
        rows: of the servers.
        names: of the tensors of each table, by column.
        files: of the rows.
    """

    def __init__(self, tables: Sequence[DynamicTable], names: Sequence[str], chief: str) -> None:
        self.tables = [TableOnServer(table) for table in tables]
        self.rows = [table.rows for table in self.tables]
        self._columns = self.tables[0].columns
        self.names = [dynamic_names(name, [c for c in self._columns if c not in _HIDDEN]) for name in names]
        self.files = RowFiles(self.names, self._columns, chief)

    @property
    def shapes(self) -> dict[str, tuple[Any, ...]]:
        return {name: tuple(open_shape(self._columns[c])) for names in self.names for c, name in names.items()}

    def restore(self, path: str) -> None:
        """Replaces all rows by those of a checkpoint."""
        self.files.traced("clear", self._clear)()
        self.files.load(path, self.tables)

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers have."""
        put = None
        for table, layer in enumerate(self.tables[0].table.layers):
            ids, vectors = layer.ids, layer.rows
            put = put or self.files.traced(
                "put",
                self._put,
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, *vectors.shape[1:]], vectors.dtype),
                tf.TensorSpec([], tf.int32),
            )
            for start in range(0, len(ids), self.files.chunk):
                part = slice(start, start + self.files.chunk)
                put(*map(tf.constant, (np.int32(table), ids[part], vectors[part], np.int32(step))))

    def read(self, wanted: Collection[str]) -> Iterator[dict[str, np.ndarray]]:
        """Columns of tables, by their names in checkpoints, table by table."""
        for table, names in enumerate(self.names):
            own = {column: name for column, name in names.items() if name in wanted}
            if not own:
                continue
            parts: dict[str, list[np.ndarray]] = {name: [] for name in own.values()}
            for rows in self.rows:
                function = self.files.traced(
                    ("read", id(rows), tuple(own)),
                    partial(self._read, rows, list(own)),
                    tf.TensorSpec([], tf.int32),
                    tf.TensorSpec([], tf.int64),
                )
                for start in range(0, int(rows.num_rows.numpy()), self.files.chunk):
                    found = function(tf.constant(table), tf.constant(start, tf.int64))
                    for name, tensor in zip(own.values(), found):
                        parts[name].append(tensor.numpy())
            empty = {
                name: np.zeros((0, *self.shapes[name][1:]), self._dtype_of(column)) for column, name in own.items()
            }
            yield {name: np.concatenate([empty[name], *of_name]) for name, of_name in parts.items()}

    def _dtype_of(self, column: str) -> Any:
        return self._columns[column].dtype.as_numpy_dtype

    def _clear(self) -> None:
        for server in self.tables:
            with tf.device(server.device):
                server.table.clear()

    def _put(self, table: tf.Tensor, ids: tf.Tensor, vectors: tf.Tensor, step: tf.Tensor) -> None:
        for server in self.tables:
            with tf.device(server.device):
                is_own = server.keys_here(tf.identity(ids), table)
                own = tf.boolean_mask(ids, is_own)
                tables = tf.fill(tf.shape(own), table)
                values = {"ids": own, "vectors": tf.boolean_mask(vectors, is_own)}
                server.table.put(tables, {**values, "last_steps": tf.fill(tf.shape(own), step)})

    def _read(self, rows: Rows, columns: Sequence[str], table: tf.Tensor, start: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(rows.device):
            chosen = self.files.rows_of(rows, start, table)
            return [rows.columns[column].sparse_read(chosen) for column in columns]
