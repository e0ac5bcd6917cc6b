"""`LookupRounds`: a function of a model, cut where it needs rows of its embedding tables.

Traced with open rows, its graph tells which ids depend on no rows. It computes these first; then the rows of all tables
are fetched at once; then it goes on. Where ids depend on rows, there are several rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from kdist.model.embedding_lookup import ArrivingRows, RowLookups
from kdist.model.phases import Phases
from kdist.model.table_groups import TableGroup


@dataclass(frozen=True)
class Wanted:
    """Rows of a group.

    Attributes:
        numbers: int64 `[n]`, each once.
        tables: the position of the table of each in the group, int32 `[n]`, in ascending order.
    """

    numbers: tf.Tensor
    tables: tf.Tensor


class RowSource(Protocol):
    """Where the rows of groups of tables are; a group is named by its index. Called while a function is traced."""

    def number(self, group: int, tables: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """The numbers of rows in a group, int64 `[n]`.

        Args:
            tables: the position of the table of each in the group, int32 `[n]`.
            ids: int64 `[n]`; all of them are in their tables.
        """

    def fetch(self, wanted: Mapping[int, Wanted]) -> Mapping[int, tf.Tensor]:
        """Rows of groups, `[n, ...]`."""


#: What the error of an id that is not in its table says, before the index of the table and the id.
WRONG_ID = "no such row of trainable variable"


class LookupRounds:
    """Traces a function, once for any number of runs.

    Args:
        function: nested tensors -> its nested outputs, and its lookups, of the same groups.
        specs: of its arguments.
        groups: of the tables.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Any, RowLookups]],
        specs: Sequence[Any],
        groups: Sequence[TableGroup],
    ) -> None:
        self._groups = groups
        traced: list[Any] = []

        def trace(*arguments: Any) -> None:
            traced.append((arguments, *function(*arguments)))

        graph = tf.function(trace, autograph=False).get_concrete_function(*specs).graph
        ((arguments, outputs, lookups),) = traced
        self._rounds: list[dict[int, ArrivingRows]] = lookups.rounds
        arriving = [[rows.inputs for rows in of_round.values()] for of_round in self._rounds]
        wanted = [[[lookup.ids for lookup in a.by_table] for a in of_round.values()] for of_round in self._rounds]
        self._phases = Phases(graph, graph.captures, lookups.levels, [arguments, *arriving], [*wanted, outputs])
        # Traced once, no matter how many steps a call unrolls: it has a few operations for each lookup.
        self._join = tf.function(_join, autograph=False)

    def run(self, arguments: Any, source: RowSource) -> Any:
        """The function's outputs for `arguments`; called while a function is traced."""
        running = self._phases.run(arguments)
        found = next(running)
        for of_round in self._rounds:
            found = running.send(self._arrive(of_round, found, source))
        return found

    def _arrive(self, of_round: Mapping[int, ArrivingRows], wanted: Sequence[Any], source: RowSource) -> list[Any]:
        """What arrives in a round, as `ArrivingRows.inputs`, from the ids of its lookups."""
        arrived: dict[int, list[Any]] = {}
        rows_of: dict[int, Wanted] = {}
        sizes: dict[int, tf.Tensor] = {}
        for (g, arriving), of_lookups in zip(of_round.items(), wanted):
            tables = tuple(lookup.table for lookup in arriving.by_table)
            ids, of_id, sizes[g] = self._join(self._groups[g], tables, of_lookups)
            numbers, places = tf.unique(source.number(g, of_id, ids))
            if len(self._groups[g].tables) == 1:
                # Beside the little that a step of such a model computes, each operation counts.
                of_row, counts = tf.zeros_like(numbers, tf.int32), tf.size(numbers)[tf.newaxis]
            else:
                # A row is of one table, so that those of each table are next to each other, as its lookups are.
                of_row = tf.math.unsorted_segment_max(of_id, places, tf.size(numbers))
                of_all = tf.math.bincount(of_row, minlength=len(self._groups[g].tables))
                counts = tf.gather(of_all, list(dict.fromkeys(tables)))
            rows_of[g] = Wanted(numbers, of_row)
            arrived[g] = [numbers, counts, places]
        rows = source.fetch(rows_of)
        looked_up = {g: tf.gather(rows[g], found[-1]) for g, found in arrived.items()}
        return [
            [
                *found,
                *([looked_up[g]] if len(of_lookups) == 1 else tf.split(looked_up[g], sizes[g], num=len(of_lookups))),
            ]
            for (g, found), of_lookups in zip(arrived.items(), wanted)
        ]


def _join(
    group: TableGroup, tables: tuple[int, ...], ids: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The ids of some lookups, checked; the position of the table of each id; how many ids each lookup has.

    Args:
        tables: of each lookup the position of its table in the group, in ascending order.
        ids: of each lookup, int64 `[n]`.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, an id is not in its table.
    """
    sizes = [tf.size(of_lookup) for of_lookup in ids]
    every = tf.concat(ids, 0)
    table = tf.concat([tf.fill([size], place) for size, place in zip(sizes, tables)], 0)
    if group.dynamic:
        return every, table, tf.stack(sizes)
    if len(group.tables) == 1:
        first, last, end = tf.reduce_min(every), tf.reduce_max(every), group.num_rows[0]
        wrong = [WRONG_ID, group.tables[0], tf.where(first < 0, first, last)]
        checked = tf.raw_ops.Assert(condition=(first >= 0) & (last < end), data=wrong)
        with tf.control_dependencies([checked]):
            return tf.identity(every), table, tf.stack(sizes)
    is_wrong = (every < 0) | (every >= tf.gather(tf.constant(group.num_rows, tf.int64), table))
    # Otherwise a wrong id would be a row of another table.
    checked = _assert_none(is_wrong, tf.gather(tf.constant(group.tables), table), every)
    with tf.control_dependencies([checked]):
        return tf.identity(every), table, tf.stack(sizes)


def _assert_none(is_wrong: tf.Tensor, table: tf.Tensor, ids: tf.Tensor) -> tf.Operation:
    """Fails, with the first wrong id and its table, if there is any."""
    # One more, so that there is always a first one.
    first = tf.argmax(tf.cast(tf.concat([is_wrong, [True]], 0), tf.int8))
    table, ids = tf.concat([table, [-1]], 0), tf.concat([ids, [-1]], 0)
    return tf.raw_ops.Assert(condition=table[first] < 0, data=[WRONG_ID, table[first], ids[first]])
