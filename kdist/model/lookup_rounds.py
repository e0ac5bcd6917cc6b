"""`LookupRounds`: a function of a model, cut where it needs rows of its embedding tables.

Traced with open rows, its graph tells which ids depend on no rows. It computes these first; then the rows of all tables
are fetched at once; then it goes on. Where ids depend on rows, there are several rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from kdist.model.embedding_lookup import ArrivingRows, RowLookups
from kdist.model.phases import Phases
from kdist.model.table_groups import TableGroup

#: Fetches rows of groups of tables: for each group, by its index, the numbers of its rows, int64 `[n]`, each once, ->
#: these rows `[n, ...]`.
FetchRows: TypeAlias = "Callable[[Mapping[int, tf.Tensor]], Mapping[int, tf.Tensor]]"

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
        wanted = [[[lookup.ids for lookup in a.by_table()] for a in of_round.values()] for of_round in self._rounds]
        self._phases = Phases(graph, graph.captures, lookups.levels, [arguments, *arriving], [*wanted, outputs])
        # Traced once, no matter how many steps a call unrolls.
        self._find = tf.function(find_rows, autograph=False)

    def run(self, arguments: Any, fetch: FetchRows) -> Any:
        """The function's outputs for `arguments`; called while a function is traced, or eagerly."""
        running = self._phases.run(arguments)
        found = next(running)
        for of_round in self._rounds:
            found = running.send(self._arrive(of_round, found, fetch))
        return found

    def _arrive(self, of_round: Mapping[int, ArrivingRows], wanted: Sequence[Any], fetch: FetchRows) -> list[Any]:
        """What arrives in a round, as `ArrivingRows.inputs`, from the ids of its lookups."""
        numbers: dict[int, tf.Tensor] = {}
        beside: list[list[Any]] = []
        for (g, arriving), ids in zip(of_round.items(), wanted):
            tables = tuple(lookup.table for lookup in arriving.by_table())
            numbers[g], own_ids, counts, positions = self._find(self._groups[g], tables, ids)
            beside.append([own_ids, counts, *positions])
        rows = fetch(numbers)
        return [[rows[g], *others] for g, others in zip(of_round, beside)]


def find_rows(group: TableGroup, tables: tuple[int, ...], ids: Sequence[tf.Tensor]) -> tuple[Any, ...]:
    """Which rows of a group some lookups need.

    Args:
        tables: of each lookup the position of its table in the group, in ascending order.
        ids: of each lookup, int64 `[n]`.

    Returns:
        The numbers of the rows, int64 `[n]`, each once, table by table; their ids in their tables; how many are of each
        table, int64 `[tables]`; and for each lookup the places of its ids among them, int32.

    Raises:
        tf.errors.InvalidArgumentError: when it runs, an id is not in its table.
    """
    sizes = tf.stack([tf.size(of_lookup) for of_lookup in ids])
    every, number = tf.concat(ids, 0), tf.constant(tables)
    # One operation for all tables, however many there are.
    of_id = tf.gather(number, tf.searchsorted(tf.cumsum(sizes), tf.range(tf.reduce_sum(sizes)), side="right"))
    offsets = tf.constant(group.offsets, tf.int64)
    is_wrong = (every < 0) | (every >= tf.gather(tf.constant(group.num_rows, tf.int64), of_id))
    # Otherwise a wrong id would be a row of another table.
    checked = _assert_none(is_wrong, tf.gather(tf.constant(group.tables), of_id), every)
    with tf.control_dependencies([checked]):
        rows, positions = tf.unique(every + tf.gather(offsets, of_id))
    of_row = tf.searchsorted(offsets, rows, side="right") - 1
    counts = tf.math.bincount(of_row, minlength=len(group.tables), maxlength=len(group.tables), dtype=tf.int64)
    return rows, rows - tf.gather(offsets, of_row), counts, tf.split(positions, sizes, num=len(ids))


def _assert_none(is_wrong: tf.Tensor, table: tf.Tensor, ids: tf.Tensor) -> tf.Operation:
    """Fails, with the first wrong id and its table, if there is any."""
    # One more, so that there is always a first one.
    first = tf.argmax(tf.cast(tf.concat([is_wrong, [True]], 0), tf.int8))
    table, ids = tf.concat([table, [-1]], 0), tf.concat([ids, [-1]], 0)
    return tf.raw_ops.Assert(condition=table[first] < 0, data=[WRONG_ID, table[first], ids[first]])
