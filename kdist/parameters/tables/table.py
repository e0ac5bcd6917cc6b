"""The tables of servers: one contract, for tables with a length and without.

A table has some rows of a group of embedding tables, on one server; a row is known by its table and its id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras import set_value
from kdist.model.names import AVERAGE
from kdist.parameters.placement.blocks import Blocks
from kdist.parameters.placement.plan import Shard
from kdist.parameters.tables.dynamic_table import IDS, TABLES, DynamicTable
from kdist.parameters.tables.rows import RowLock, set_rows


class FixedTable:
    """The rows of tables with a length that a block stores: a key is a row.

    `DynamicTable` has the same methods; all but the last two are called while a function is traced.

    Args:
        device: of the block.
        vectors: its variable.
        shards: its content, in the order of its rows; of each, `variable` is the position of the table in its group.
        interval: on its server, scalar int32: the present interval between saves, if rows are marked that change in it.
        is_shared: whether several workers update rows at the same time.

    Attributes:
        stored: variables by column, each `[capacity, ...]`: `vectors`, slots, and more.
        lock: of all rows.
    """

    def __init__(
        self,
        device: str,
        vectors: tf.Variable,
        shards: Sequence[Shard],
        interval: tf.Variable | None = None,
        *,
        is_shared: bool,
    ) -> None:
        self.device, self.vectors = device, vectors
        self.stored: dict[str, tf.Variable] = {"vectors": vectors}
        lengths = [shard.stop - shard.start for shard in shards]
        #: The shards, each with its first row.
        self._places = list(zip(shards, accumulate(lengths, initial=0)))
        self._interval = interval
        with tf.device(device):
            self.lock = RowLock(is_shared=is_shared)
            if interval is not None:
                #: For each row, in which interval it has changed last; 0 if it never did.
                self._marks = tf.Variable(tf.zeros([vectors.shape[0]], tf.int32), trainable=False)

    def read(self, request: tf.Tensor, step_of: Callable[[], tf.Tensor], *, inserts: bool) -> tf.Tensor:
        """The vectors of keys, on the device of the server.

        Args:
            request: int64 `[n]`, as `TableRows.fetch` makes it: the rows; of dynamic tables, as `DynamicTable.read`.
            step_of: returns the global step.
            inserts: whether new keys get a row.
        """
        return self.vectors.sparse_read(request)

    def begin_update(
        self, gradient: tf.IndexedSlices, step: tf.Tensor, updates: list[tf.Operation]
    ) -> tf.IndexedSlices:
        """Converts a gradient by key to one by row, and marks these rows as changed.

        Args:
            step: the global step.
            updates: operations that mark are added.
        """
        if self._interval is not None:
            rows = gradient.indices
            updates.append(set_rows(self._marks, rows, tf.fill(tf.shape(rows), self._interval.read_value())))
        return gradient

    def changed(self, since: tf.Tensor) -> dict[str, tf.Tensor]:
        """The rows that have changed after an interval between saves, all if it is -1, by column: those that are
        stored, `ids`, int64 `[n]`, and `tables`, the positions in the group, int32 `[n]`.
        """
        rows = tf.where(self._marks.read_value() > since)[:, 0]
        firsts = tf.constant([first for _, first in self._places], tf.int64)
        number = tf.searchsorted(firsts, rows, side="right") - 1
        shifts = tf.constant([shard.start - first for shard, first in self._places], tf.int64)
        tables = tf.constant([shard.variable for shard, _ in self._places], tf.int32)
        placed = {IDS: rows + tf.gather(shifts, number), TABLES: tf.gather(tables, number)}
        return {**placed, **{name: column.sparse_read(rows) for name, column in self.stored.items()}}

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """True for ids of a table, int64 `[n]`, that belong here: bool `[n]`."""
        return self._rows(ids, table) >= 0

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        """Takes rows of a table, by column, in the place of the rows that their ids have."""
        rows = self._rows(values[IDS], table)
        for name, column in self.stored.items():
            set_rows(column, rows, values[name])

    def add_slot(self, name: str, slot: keras.Variable, initial: np.ndarray) -> None:
        """Adds a column: the slot of an optimizer; `initial` is its value in a new row."""
        self.stored[name] = slot.value

    def use_averages(self) -> None:
        """Sets the vectors to their moving averages, if the optimizer keeps any; nothing may update them meanwhile."""
        if AVERAGE in self.stored:
            with tf.device(self.device):
                self.vectors.assign(self.stored[AVERAGE])

    def _rows(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """The rows of the block, int64 `[n]`; -1 for ids that are elsewhere."""
        rows = tf.fill(tf.shape(ids), tf.constant(-1, tf.int64))
        for shard, first in self._places:
            is_here = tf.equal(table, shard.variable) & (ids >= shard.start) & (ids < shard.stop)
            rows = tf.where(is_here, ids + (first - shard.start), rows)
        return rows


Table: TypeAlias = FixedTable | DynamicTable


def make_tables(
    blocks: Blocks,
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    intervals: Sequence[tf.Variable],
    *,
    is_shared: bool,
) -> dict[int, Table]:
    """The tables of all blocks that are looked up by rows; dynamic ones have no rows at first.

    Args:
        variables: of each block; one of a dynamic table gets the rows of the table.
        intervals: on each server the present one, if rows are marked that change in it.
        is_shared: whether several workers update rows at the same time.
    """
    num_dynamic = sum(bool(group.dynamic) for group in blocks.table_groups)
    tables: dict[int, Table] = {}
    for b, block in enumerate(blocks):
        if block.tables is None:
            continue
        device = devices[block.server]
        interval = intervals[block.server] if intervals and block.is_row_wise else None
        if block.is_dynamic:
            tables[b] = DynamicTable(block.tables, device, block.server, len(devices), num_dynamic, interval)
            set_value(variables[b], tables[b].vectors)
            continue
        shards = [blocks.shards[i] for i in block.shards]
        shards = [replace(shard, variable=block.tables.tables.index(shard.variable)) for shard in shards]
        is_locked = is_shared and block.is_row_wise
        tables[b] = FixedTable(device, variables[b].value, shards, interval, is_shared=is_locked)
    return tables
