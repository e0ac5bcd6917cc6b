"""`DynamicValues`: the rows of all dynamic tables, beside the `NamedValues` of everything else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.model.names import dynamic_names
from kdist.parameters.tables.dynamic_table import IDS, TABLES, DynamicTable
from kdist.parameters.tables.table import Table
from kdist.parameters.values.initial_values import on_servers
from kdist.parameters.values.slices import ChosenSlices, ServerRows, take_own


class DynamicValues:
    """The rows of all dynamic tables.

    In a checkpoint, each table has tensors of ids, of vectors, of slots, of counts.

    Args:
        groups: for each group the names of its vectors, without `parameters/`, and its tables on the servers; tables
            with a length are ignored.

    Attributes:
        slices: the rows of each group, to be saved and restored.
        shapes: of the columns of all tables, by their names in checkpoints; None for the number of rows.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[str], Sequence[Table]]]) -> None:
        dynamic = [(names, [t for t in tables if isinstance(t, DynamicTable)]) for names, tables in groups]
        self._groups = [(names, tables) for names, tables in dynamic if tables]
        self.slices = [
            ChosenSlices(
                [dynamic_names(n, [c for c in tables[0].stored if c != TABLES]) for n in names], tables, tables
            )
            for names, tables in self._groups
        ]
        self.shapes: dict[str, tuple[Any, ...]] = {
            name: tuple(of_group.columns[column].shape)
            for of_group in self.slices
            for names in of_group.names
            for column, name in names.items()
        }

    def __bool__(self) -> bool:
        return bool(self._groups)

    def clear(self) -> None:
        def clear(tables: Sequence[DynamicTable]) -> None:
            for table in tables:
                table.clear()

        for of_group, (_, tables) in zip(self.slices, self._groups):
            of_group.traced("clear", partial(clear, tables))()

    def fill(self, step: int) -> None:
        """Gives rows to the ids that the layers of the model have, as new ones in that step."""
        for of_group, (_, tables) in zip(self.slices, self._groups):
            scalar, ids_spec = tf.TensorSpec([], tf.int32), of_group.columns[IDS]
            specs = scalar, ids_spec, of_group.columns["vectors"], scalar
            for table, layer in enumerate(tables[0].layers):
                ids, rows = layer.ids, layer.rows
                for start in range(0, len(ids), of_group.slice_rows):
                    chosen = slice(start, start + of_group.slice_rows)
                    # Traced for the first ids: a new model has none.
                    put = of_group.traced("put", partial(_put, tables), *specs)
                    put(*map(tf.constant, (np.int32(table), ids[chosen], rows[chosen], np.int32(step))))

    def hand_over(self) -> None:
        """Lets the layers of the model look up no rows in this process from now on."""
        for _, tables in self._groups:
            for layer in tables[0].layers:
                layer.hand_over(on_servers(layer.path))

    def read(self, wanted: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Columns by their names in checkpoints, table by table; all if None."""
        for of_group in self.slices:
            for table, names in enumerate(of_group.names):
                own = {column: name for column, name in names.items() if wanted is None or name in wanted}
                if own:
                    yield _read(of_group, table, own)

    def count(self) -> None:
        """Tells the layers the number of their rows; layers of a group get the average."""
        for names, tables in self._groups:
            total = sum(int(server.num_live().numpy()) for server in tables)
            for layer in tables[0].layers:
                layer.num_rows = -(-total // len(names))


def _put(
    servers: Sequence[DynamicTable], table: tf.Tensor, ids: tf.Tensor, vectors: tf.Tensor, step: tf.Tensor
) -> None:
    values = {IDS: ids, "vectors": vectors, "last_steps": tf.fill(tf.shape(ids), step)}
    for server in servers:
        take_own(server, table, values)


def _read(slices: ChosenSlices, table: int, own: dict[str, str]) -> dict[str, np.ndarray]:
    def read(rows: ServerRows, start: tf.Tensor, table: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(rows.device):
            chosen = slices.rows_of(rows, start, table)
            return [rows.stored[column].sparse_read(chosen) for column in own]

    scalars = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)
    specs = [slices.columns[column] for column in own]
    # Without rows, a column has its shape, too.
    found = [[np.zeros((0, *spec.shape[1:]), spec.dtype.as_numpy_dtype) for spec in specs]]
    for rows in slices.rows:
        function = slices.traced(("read", id(rows.num_rows), tuple(own)), partial(read, rows), *scalars)
        for start in range(0, int(rows.num_rows.numpy()), slices.slice_rows):
            tensors = function(tf.constant(start, tf.int64), tf.constant(table))
            found.append([tensor.numpy() for tensor in tensors])
    return dict(zip(own.values(), map(np.concatenate, zip(*found))))
