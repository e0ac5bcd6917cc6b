"""`DynamicValues`: the rows of all dynamic tables, beside the `NamedValues` of everything else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.model.names import dynamic_names
from kdist.parameters.tables.dynamic_table import TABLES, DynamicTable
from kdist.parameters.tables.rows import open_shape
from kdist.parameters.tables.table import Table
from kdist.parameters.values.initial_values import on_servers
from kdist.parameters.values.slices import ChosenSlices, ServerRows


class _Group:
    """The tables of a group: in a checkpoint, each has tensors of ids, of vectors, of slots, of counts.

    Args:
        names: of the vectors of each table, without `parameters/`.
        tables: of the servers.
    """

    def __init__(self, names: Sequence[str], tables: Sequence[DynamicTable]) -> None:
        self.tables = tables
        self._columns = tables[0].stored
        self.names = [dynamic_names(name, [c for c in self._columns if c != TABLES]) for name in names]
        self._rows = [ServerRows(table.device, table.stored, table.num_rows) for table in tables]
        self.slices = ChosenSlices(self.names, tables, self._rows)

    @property
    def shapes(self) -> dict[str, tuple[Any, ...]]:
        return {name: tuple(open_shape(self._columns[c])) for names in self.names for c, name in names.items()}

    def clear(self) -> None:
        """Forgets all rows."""
        self.slices.traced("clear", self._clear)()

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers have."""
        put = None
        for table, layer in enumerate(self.tables[0].layers):
            ids, vectors = layer.ids, layer.rows
            put = put or self.slices.traced(
                "put",
                self._put,
                tf.TensorSpec([], tf.int32),
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, *vectors.shape[1:]], vectors.dtype),
                tf.TensorSpec([], tf.int32),
            )
            for start in range(0, len(ids), self.slices.slice_rows):
                part = slice(start, start + self.slices.slice_rows)
                put(*map(tf.constant, (np.int32(table), ids[part], vectors[part], np.int32(step))))

    def read(self, wanted: Collection[str]) -> Iterator[dict[str, np.ndarray]]:
        """Columns of tables, by their names in checkpoints, table by table."""
        for table, names in enumerate(self.names):
            own = {column: name for column, name in names.items() if name in wanted}
            if not own:
                continue
            parts: dict[str, list[np.ndarray]] = {name: [] for name in own.values()}
            for rows in self._rows:
                function = self.slices.traced(
                    ("read", id(rows.num_rows), tuple(own)),
                    partial(self._read, rows, list(own)),
                    tf.TensorSpec([], tf.int32),
                    tf.TensorSpec([], tf.int64),
                )
                for start in range(0, int(rows.num_rows.numpy()), self.slices.slice_rows):
                    found = function(tf.constant(table), tf.constant(start, tf.int64))
                    for name, tensor in zip(own.values(), found):
                        parts[name].append(tensor.numpy())
            empty = {
                name: np.zeros((0, *self.shapes[name][1:]), self._columns[column].dtype.as_numpy_dtype)
                for column, name in own.items()
            }
            yield {name: np.concatenate([empty[name], *of_name]) for name, of_name in parts.items()}

    def _clear(self) -> None:
        for table in self.tables:
            with tf.device(table.device):
                table.clear()

    def _put(self, table: tf.Tensor, ids: tf.Tensor, vectors: tf.Tensor, step: tf.Tensor) -> None:
        for server in self.tables:
            with tf.device(server.device):
                is_own = server.keys_here(tf.identity(ids), table)
                own = tf.boolean_mask(ids, is_own)
                tables = tf.fill(tf.shape(own), table)
                values = {"ids": own, "vectors": tf.boolean_mask(vectors, is_own)}
                server.put(tables, {**values, "last_steps": tf.fill(tf.shape(own), step)})

    def _read(self, rows: ServerRows, columns: Sequence[str], table: tf.Tensor, start: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(rows.device):
            chosen = self.slices.rows_of(rows, start, table)
            return [rows.columns[column].sparse_read(chosen) for column in columns]


class DynamicValues:
    """The rows of all dynamic tables.

    Args:
        groups: for each group the names of its vectors, without `parameters/`, and its tables on the servers; tables
            with a length are ignored.

    Attributes:
        shapes: of the columns of all tables, by their names in checkpoints; None for the number of rows.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[str], Sequence[Table]]]) -> None:
        dynamic = [(names, [t for t in tables if isinstance(t, DynamicTable)]) for names, tables in groups]
        self._groups = [_Group(names, tables) for names, tables in dynamic if tables]
        self.shapes = {name: shape for group in self._groups for name, shape in group.shapes.items()}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def slices(self) -> list[ChosenSlices]:
        """The rows, to be saved and restored."""
        return [group.slices for group in self._groups]

    def clear(self) -> None:
        """Forgets all rows."""
        for group in self._groups:
            group.clear()

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers of the model have, as new ones in that step."""
        for group in self._groups:
            group.fill(step)

    def hand_over(self) -> None:
        """Lets the layers of the model look up no rows in this process from now on."""
        for group in self._groups:
            for layer in group.tables[0].layers:
                layer.hand_over(on_servers(layer.path))

    def read(self, wanted: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Columns by their names in checkpoints, table by table; all if None."""
        for group in self._groups:
            yield from group.read(self.shapes if wanted is None else wanted)

    def count(self) -> None:
        """Tells the layers the number of their rows; layers of a group get the average."""
        for group in self._groups:
            total = sum(int(server.num_live().numpy()) for server in group.tables)
            for layer in group.tables[0].layers:
                layer.num_rows = -(-total // len(group.names))
