"""`DeltaFiles`: the rows of all tables that have changed since a save, and how servers put them into their tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from kdist.model.names import CHANGED_IDS, EVICTED, dynamic_names
from kdist.parameters.tables.changed_rows import ChangedRows, EvictedRows, SaveIntervals
from kdist.parameters.tables.dynamic_table import CHANGED, DynamicTable
from kdist.parameters.tables.resizable_variable import set_rows
from kdist.parameters.values.dynamic_files import TableOnServer
from kdist.parameters.values.row_files import IDS, TABLES, Copies, Receiver, RowFiles, Saving, Source, chief_device


@dataclass(frozen=True)
class RowRange:
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


class BlockRows:
    """The rows of tables in a block: the source of changed ones, and what takes rows.

    Args:
        device: of the block.
        columns: `vectors` and slots, variables of the shape of the block.
        ranges: what is in it, in the order of its rows.
        marks: of its rows; None if deltas are only read.
    """

    def __init__(
        self, device: str, columns: Mapping[str, tf.Variable], ranges: Sequence[RowRange], marks: ChangedRows | None
    ) -> None:
        self.device, self.columns = device, columns
        self._ranges = ranges
        self._marks = marks

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        assert self._marks is not None
        return self._marks.changed(since)

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
        for name, column in self.columns.items():
            set_rows(column, rows, values[name])

    def _rows(self, ids: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        """The rows of the block, int64 `[n]`; -1 for those that are elsewhere."""
        rows = tf.fill(tf.shape(ids), tf.constant(-1, tf.int64))
        for r in self._ranges:
            is_here = tf.equal(table, r.table) & (ids >= r.start) & (ids < r.stop)
            rows = tf.where(is_here, ids + (r.first - r.start), rows)
        return rows


class ChangedTable(TableOnServer):
    """The changed rows of a dynamic table on a server; it takes rows in the place of those that the ids have."""

    def chosen(self, since: tf.Tensor) -> tf.Tensor:
        rows = tf.range(self.table.num_rows.read_value())
        marks, tables = (self.table.columns[name].variable.sparse_read(rows) for name in (CHANGED, TABLES))
        return tf.boolean_mask(rows, (marks > since) & (tables >= 0))

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        self.table.remove(values[IDS], table)
        super().take(table, values)


class EvictingTable(TableOnServer):
    """A dynamic table on a server that takes ids by evicting them."""

    def take(self, table: tf.Tensor, values: dict[str, tf.Tensor]) -> None:
        self.table.remove(values[IDS], table)


@dataclass(frozen=True)
class _Group:
    """What deltas have of a group of tables, in the same tensors."""

    files: RowFiles
    sources: Sequence[Source]
    receivers: Sequence[Receiver]

    @cached_property
    def copies(self) -> Copies:
        return Copies(self.sources)


class DeltaFiles:
    """Saves the changed rows of all tables, and puts those of a delta into the tables.

    The servers copy the changed rows first, so that training may go on while they are written.

    Args:
        fixed: for each group of tables with a length, the names of its tables without `parameters/`, and its blocks.
        dynamic: for each group of dynamic tables, their names, and the tables of the servers.
        intervals: between saves; None if deltas are only read.

    Attributes:
        names: of the values of which a delta has only some rows.
        through_chief: as in `RowFiles`.
    """

    def __init__(
        self,
        fixed: Sequence[tuple[Sequence[str], Sequence[BlockRows]]],
        dynamic: Sequence[tuple[Sequence[str], Sequence[DynamicTable]]],
        intervals: SaveIntervals | None,
    ) -> None:
        self.intervals = intervals
        self._groups: list[_Group] = []
        self._evicted: list[EvictedRows] = []
        for names, blocks in fixed:
            self._add([changed_names(name, blocks[0].columns) for name in names], blocks[0].columns, blocks, blocks)
        for names, tables in dynamic:
            evicted = [table.evicted for table in tables if table.evicted is not None]
            self._evicted += evicted
            # First: an id that was evicted may have come again.
            self._add([{IDS: f"{EVICTED}{name}"} for name in names], {}, evicted, list(map(EvictingTable, tables)))
            changed = list(map(ChangedTable, tables))
            columns = {name: column for name, column in changed[0].columns.items() if name not in (IDS, TABLES)}
            self._add([changed_names(name, columns) for name in names], columns, changed, changed)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(n for group in self._groups for names in group.files.names for n in names.values())

    def travel_through_chief(self, whether: bool) -> None:
        """Lets this process read and write files, because the servers do not see them."""
        for group in self._groups:
            group.files.through_chief = whether

    def next_interval(self, since: int | None) -> int | None:
        """Begins another interval; nothing may change rows meanwhile.

        Args:
            since: the interval after which the next delta has what changed; None if there is no such delta.

        Returns:
            The number of the one that it ends; None if there are none.
        """
        if self.intervals is None:
            return None
        ended = self.intervals.next()
        self._forget(tf.constant(ended if since is None else since, tf.int32))
        return ended

    def copy(self, since: int) -> None:
        """Copies what has changed after an interval."""
        for group in self._groups:
            group.copies.fill(since)

    def release(self) -> None:
        """Gives the memory of the copies back."""
        for group in self._groups:
            group.copies.release()

    def not_finite(self) -> list[str]:
        """The names of the tables whose copied rows contain NaN or infinity."""
        return [name for group in self._groups for name in group.files.not_finite(group.copies.rows)]

    def saving(self, folder: str) -> Saving:
        """What writes the copies."""
        return Saving.all_of(
            [group.files.saving(folder, f"delta-{g}", group.copies.rows) for g, group in enumerate(self._groups)]
        )

    def restore(self, path: str) -> None:
        """Puts the rows of a delta into the tables, which are as they were when it began."""
        for group in self._groups:
            group.files.load(path, group.receivers)

    def _add(
        self,
        names: Sequence[Mapping[str, str]],
        columns: Mapping[str, tf.Variable],
        sources: Sequence[Source],
        receivers: Sequence[Receiver],
    ) -> None:
        specs = {name: tf.TensorSpec([None, *column.shape[1:]], column.dtype) for name, column in columns.items()}
        files = RowFiles(names, {IDS: tf.TensorSpec([None], tf.int64), **specs}, chief_device())
        self._groups.append(_Group(files, sources, receivers))

    @cached_property
    def _forget(self) -> Callable[[tf.Tensor], object]:
        def forget(up_to: tf.Tensor) -> None:
            for rows in self._evicted:
                rows.forget(up_to)

        return tf.function(forget, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))


def changed_names(table: str, columns: Collection[str]) -> dict[str, str]:
    """The tensors of a table in a delta, by column: as in a checkpoint, but with changed rows only, and their ids."""
    return {IDS: f"{CHANGED_IDS}{table}", **dynamic_names(table, list(columns))}
