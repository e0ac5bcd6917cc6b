"""The tables of servers: one contract, for those with a length and those without.

A table has some rows of a group of embedding tables, on one server; a row is known by its table and its id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from kdist.model.table_groups import TableGroup
from kdist.parameters.placement.blocks import Blocks, StoredShard
from kdist.parameters.placement.plan import Shard
from kdist.parameters.tables.changed_rows import ChangedRows, SaveIntervals
from kdist.parameters.tables.dynamic_table import IDS, TABLES, DynamicTable
from kdist.parameters.tables.resizable_variable import set_rows


class Table(Protocol):
    """The rows of a group on one server; all methods are called while a function is traced."""

    device: str

    @property
    def stored(self) -> Mapping[str, tf.Variable]:
        """Variables by column, each `[capacity, ...]`."""

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        """The rows that have changed after an interval between saves, int64 `[n]`; all rows if it is -1."""

    def placed(self, rows: tf.Tensor) -> Mapping[str, tf.Tensor]:
        """Columns that are not stored: `ids`, int64 `[n]`, and `tables`, the position in the group, int32 `[n]`."""

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """Which ids of a table, int64 `[n]`, belong here: bool `[n]`."""

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        """Takes rows of a table, by column, in the place of those that their ids have."""


@dataclass(frozen=True)
class TableShard:
    """Rows of a table that follow each other in a block.

    Attributes:
        table: the position of the table in its group.
        start, stop: the rows, `stop` excluded.
        first: the row of the block that has row `start`.
    """

    table: int
    start: int
    stop: int
    first: int


class FixedTable:
    """The rows of tables with a length that a block stores.

    Args:
        device: of the block.
        stored: `vectors` and slots, variables of the shape of the block.
        ranges: what is in it, in the order of its rows.
        changed_rows: of the block; None if nobody asks what changes.
    """

    def __init__(
        self,
        device: str,
        stored: Mapping[str, tf.Variable],
        ranges: Sequence[TableShard],
        changed_rows: ChangedRows | None,
    ) -> None:
        self.device, self.stored = device, stored
        self._ranges = ranges
        self._changed_rows = changed_rows

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        assert self._changed_rows is not None
        return self._changed_rows.changed(since)

    def placed(self, rows: tf.Tensor) -> Mapping[str, tf.Tensor]:
        firsts, starts = ([getattr(r, name) for r in self._ranges] for name in ("first", "start"))
        number = tf.searchsorted(tf.constant(firsts, tf.int64), rows, side="right") - 1
        shifts = tf.constant([start - first for start, first in zip(starts, firsts)], tf.int64)
        tables = tf.constant([r.table for r in self._ranges], tf.int32)
        return {IDS: rows + tf.gather(shifts, number), TABLES: tf.gather(tables, number)}

    def keys_here(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        return self._rows(ids, table) >= 0

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        rows = self._rows(values[IDS], table)
        for name, column in self.stored.items():
            set_rows(column, rows, values[name])

    def _rows(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """The rows of the block, int64 `[n]`; -1 for those that are elsewhere."""
        rows = tf.fill(tf.shape(ids), tf.constant(-1, tf.int64))
        for r in self._ranges:
            is_here = tf.equal(table, r.table) & (ids >= r.start) & (ids < r.stop)
            rows = tf.where(is_here, ids + (r.first - r.start), rows)
        return rows


def make_dynamic(blocks: Blocks, devices: Sequence[str], intervals: SaveIntervals | None) -> dict[int, DynamicTable]:
    """The rows of the blocks of dynamic tables, none at first.

    Args:
        intervals: in which their changes are marked, if they are.
    """
    num_dynamic = sum(bool(group.dynamic) for group in blocks.table_groups)
    found = {}
    for b, block in enumerate(blocks):
        if block.is_dynamic:
            group = blocks.table_groups[blocks.table_group(b)]
            device = devices[block.server]
            interval = None if intervals is None else intervals.of_servers[block.server]
            found[b] = DynamicTable(group, device, block.server, len(devices), num_dynamic, interval)
    return found


def make_marks(blocks: Blocks, devices: Sequence[str], intervals: SaveIntervals | None) -> dict[int, ChangedRows]:
    """The marks of the rows of other tables that are updated by rows; none without intervals."""
    found: dict[int, ChangedRows] = {}
    for b, block in enumerate(blocks):
        if intervals is not None and block.is_row_wise and not block.is_dynamic:
            with tf.device(devices[block.server]):
                num_rows = sum(blocks.shape_of(i)[0] for i in block.shards)
                found[b] = ChangedRows(num_rows, intervals.of_servers[block.server])
    return found


def dynamic_tables(
    groups: Sequence[TableGroup],
    names: Sequence[str],
    shards: Sequence[Shard],
    blocks: Blocks,
    tables: Mapping[int, DynamicTable],
) -> list[tuple[list[str], list[DynamicTable]]]:
    """For each group of dynamic tables, the names of its tables, and its rows on the servers.

    Args:
        names: of all parameters.
        tables: by block.
    """
    found = []
    for group in groups:
        if group.dynamic:
            holders = [blocks.of_shard[i] for i in _shards_of(group.tables[0], shards)]
            of_servers = sorted((tables[b] for b in holders), key=lambda table: table.server)
            found.append(([names[table] for table in group.tables], of_servers))
    return found


def fixed_tables(
    groups: Sequence[TableGroup],
    names: Sequence[str],
    shards: Sequence[Shard],
    blocks: Blocks,
    devices: Sequence[str],
    parts: Mapping[str, Sequence[StoredShard]],
    marks: Mapping[int, ChangedRows],
) -> list[tuple[list[str], list[FixedTable]]]:
    """For each group that is updated by rows and has a length, the names of its tables, and its blocks.

    Args:
        names: of all parameters.
        devices: of the servers.
        parts: of all values, by their names in checkpoints.
        marks: of the rows that change, by block.
    """
    found = []
    for group in groups:
        if group.dynamic or not group.is_row_wise:
            continue
        ranges: dict[int, list[TableShard]] = defaultdict(list)
        columns: dict[int, dict[str, tf.Variable]] = defaultdict(dict)
        for position, table in enumerate(group.tables):
            of_table = {"vectors": parts[f"parameters/{names[table]}"]}
            slots = [name for name in parts if name.rpartition("/")[0] == f"slots/{names[table]}"]
            of_table |= {slot.rpartition("/")[2]: parts[slot] for slot in slots}
            for number, i in enumerate(_shards_of(table, shards)):
                b = blocks.of_shard[i]
                ranges[b].append(TableShard(position, shards[i].start, shards[i].stop, blocks.first_row(i)))
                columns[b] |= {column: of_shards[number].variable for column, of_shards in of_table.items()}
        of_group = [
            FixedTable(devices[blocks[b].server], columns[b], sorted(own, key=lambda rows: rows.first), marks.get(b))
            for b, own in ranges.items()
        ]
        found.append(([names[table] for table in group.tables], of_group))
    return found


def _shards_of(variable: int, shards: Sequence[Shard]) -> list[int]:
    return [i for i, shard in enumerate(shards) if shard.variable == variable]
