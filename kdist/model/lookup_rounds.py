"""`LookupRounds`: a function of a model, cut where it needs rows of its embedding tables.

Traced with open rows, its graph tells which ids depend on no rows. It computes these first; then the rows of all tables
are fetched at once; then it goes on. Where ids depend on rows, there are several rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import keras
import tensorflow as tf

from kdist._compat.tensorflow import not_compiled, run_independently
from kdist.model.embedding_lookup import RowLookups, TableGroup, sum_duplicates
from kdist.model.phases import Phases


@dataclass(frozen=True)
class RowRequest:
    """Rows of a group.

    Attributes:
        numbers: int64 `[n]`, each once.
        tables: the position of the table of each in the group, int32 `[n]`, in ascending order.
    """

    numbers: tf.Tensor
    tables: tf.Tensor


class RowSource(Protocol):
    """Gives rows of groups of tables, by the index of the group. Called while a function is traced."""

    def number(self, group: int, tables: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        """The numbers of rows in a group, int64 `[n]`: of ids, int64 `[n]`, that are in its tables at these positions,
        int32 `[n]`.
        """

    def fetch(self, wanted: Mapping[int, RowRequest]) -> Mapping[int, tf.Tensor]:
        """Rows of groups, `[n, ...]`."""


#: The rows of a group that arrive in a round: their numbers, each once, table by table, int64 `[m]`; the number of rows
#: of each table, int32 `[tables]`; for each id the place of its row among them, int32 `[n]`.
_Arrived: TypeAlias = "tuple[tf.Tensor, tf.Tensor, tf.Tensor]"

#: The lookups of a round by their group: the position of the table in the group, and the number of the lookup in its
#: round; those of one table are next to each other.
_Round: TypeAlias = "dict[int, list[tuple[int, int]]]"

#: The error of an id that is not in its table begins so, before the index of the table and the id.
WRONG_ID = "no such row of trainable variable"


class LookupRounds:
    """A traced function, run in rounds: its graph, its nested inputs and outputs there, and its lookups in tables."""

    def __init__(
        self,
        graph: Any,
        inputs: Any,
        outputs: Any,
        lookups: RowLookups,
        tables: Mapping[int, keras.layers.Layer],
        groups: Sequence[TableGroup],
    ) -> None:
        self._groups = groups
        place = {id(tables[table]): (g, i) for g, group in enumerate(groups) for i, table in enumerate(group.tables)}
        self._rounds: list[_Round] = []
        for of_round in lookups.rounds:
            by_group: _Round = {}
            for number, lookup in enumerate(of_round):
                g, table = place[id(lookup.layer)]
                by_group.setdefault(g, []).append((table, number))
            self._rounds.append({g: sorted(found) for g, found in by_group.items()})
        wanted = [[lookup.ids for lookup in of_round] for of_round in lookups.rounds]
        self._phases = Phases(graph, lookups.first_phases, [inputs, *lookups.rows], [*wanted, outputs])
        # Traced once, no matter how many steps a call unrolls: they have a few operations for each lookup.
        self._join = tf.function(not_compiled()(_join), autograph=False)
        self._gradients = tf.function(not_compiled()(self._gradients_of_tables), autograph=False)

    @staticmethod
    def of_function(
        function: Callable[..., tuple[Any, RowLookups]],
        specs: Sequence[Any],
        tables: Mapping[int, keras.layers.Layer],
        groups: Sequence[TableGroup],
    ) -> LookupRounds:
        """Traces a function: nested tensors -> its nested outputs, and its lookups."""
        traced: list[Any] = []

        def trace(*arguments: Any) -> None:
            traced.append((arguments, *function(*arguments)))

        graph = tf.function(trace, autograph=False).get_concrete_function(*specs).graph
        ((arguments, outputs, lookups),) = traced
        return LookupRounds(graph, arguments, outputs, lookups, tables, groups)

    def run(self, arguments: Any, source: RowSource) -> tuple[Any, Callable[[Any], dict[int, tf.IndexedSlices]]]:
        """The function's outputs for `arguments`; called while a function is traced.

        Returns:
            The outputs; a function that makes the sparse gradients of tables, by index, from the gradients of the rows
            that arrived, by round and lookup. Tables without one are missing. Rows are numbered as in their groups;
            a row of a row-wise table appears once, any other as often as it was looked up, as in Keras.
        """
        running = self._phases.run(arguments)
        found = next(running)
        looked_up: list[tuple[dict[int, _Arrived], list[tf.Tensor]]] = []
        for of_round in self._rounds:
            with not_compiled():
                looked_up.append(self._arrive(of_round, found, source))
            found = running.send(looked_up[-1][1])
        return found, partial(self._gradients, looked_up=looked_up)

    def _arrive(
        self, of_round: _Round, wanted: Sequence[tf.Tensor], source: RowSource
    ) -> tuple[dict[int, _Arrived], list[tf.Tensor]]:
        """Fetches the rows of a round for the ids of each lookup: those of each group, and those of each lookup."""
        arrived: dict[int, _Arrived] = {}
        rows_of: dict[int, RowRequest] = {}
        sizes: dict[int, tf.Tensor] = {}
        for g, of_lookups in of_round.items():
            tables = tuple(table for table, _ in of_lookups)
            ids, of_id, sizes[g] = self._join(self._groups[g], tables, [wanted[number] for _, number in of_lookups])
            # Otherwise each worker of a call would check its ids after the one before.
            run_independently(ids.op)
            numbers, places = tf.unique(source.number(g, of_id, ids))
            if len(self._groups[g].tables) == 1:
                # Beside the little that a step of such a model computes, each operation counts.
                of_row, counts = tf.zeros_like(numbers, tf.int32), tf.size(numbers)[tf.newaxis]
            else:
                # A row is of one table, so that those of each table are next to each other, as its lookups are.
                of_row = tf.math.unsorted_segment_max(of_id, places, tf.size(numbers))
                of_all = tf.math.unsorted_segment_sum(tf.ones_like(of_row), of_row, len(self._groups[g].tables))
                counts = tf.gather(of_all, list(dict.fromkeys(tables)))
            rows_of[g] = RowRequest(numbers, of_row)
            arrived[g] = numbers, counts, places
        fetched = source.fetch(rows_of)
        rows: dict[int, tf.Tensor] = {}
        for g, of_lookups in of_round.items():
            looked_up = tf.gather(fetched[g], arrived[g][-1])
            alone = len(of_lookups) == 1
            parts = [looked_up] if alone else tf.split(looked_up, sizes[g], num=len(of_lookups))
            rows |= {number: part for (_, number), part in zip(of_lookups, parts)}
        return arrived, [rows[number] for number in range(len(rows))]

    def _gradients_of_tables(self, of_rows: Any, looked_up: Any) -> dict[int, tf.IndexedSlices]:
        parts: dict[int, list[tf.IndexedSlices]] = {}
        for of_round, gradients, (arrived, rows) in zip(self._rounds, of_rows, looked_up):
            for g, of_lookups in of_round.items():
                own = [(number, gradients[number]) for _, number in of_lookups]
                if all(gradient is None for _, gradient in own):
                    continue
                present = [
                    tf.zeros_like(rows[number]) if gradient is None else tf.convert_to_tensor(gradient)
                    for number, gradient in own
                ]
                tables = [self._groups[g].tables[i] for i in dict.fromkeys(table for table, _ in of_lookups)]
                for table, part in _by_table(self._groups[g], tables, arrived[g], tf.concat(present, 0)).items():
                    parts.setdefault(table, []).append(part)
        row_wise = {table for group in self._groups if group.is_row_wise for table in group.tables}
        return {table: _join_parts(of_table, table in row_wise) for table, of_table in parts.items()}


def _by_table(
    group: TableGroup, tables: Sequence[int], arrived: _Arrived, gradient: tf.Tensor
) -> dict[int, tf.IndexedSlices]:
    """The gradients of the tables of a group that were looked up in a round, from that of all looked-up rows."""
    numbers, counts, places = arrived
    if not group.is_row_wise:
        return {group.tables[0]: tf.IndexedSlices(gradient, tf.gather(numbers, places))}
    gradient = tf.math.unsorted_segment_sum(gradient, places, tf.size(numbers))
    if len(tables) == 1:
        return {tables[0]: tf.IndexedSlices(gradient, numbers)}
    split = (tf.split(tensor, counts, num=len(tables)) for tensor in (gradient, numbers))
    return {table: tf.IndexedSlices(*of_table) for table, *of_table in zip(tables, *split)}


def _join_parts(parts: list[tf.IndexedSlices], is_row_wise: bool) -> tf.IndexedSlices:
    if len(parts) == 1:
        return parts[0]
    slices = tf.IndexedSlices(tf.concat([p.values for p in parts], 0), tf.concat([p.indices for p in parts], 0))
    return sum_duplicates(slices) if is_row_wise else slices


def _join(
    group: TableGroup, tables: tuple[int, ...], ids: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the ids of some lookups, checked; the position of the table of each id; the number of ids of each lookup.

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
        lowest, highest, end = tf.reduce_min(every), tf.reduce_max(every), group.num_rows[0]
        wrong = [WRONG_ID, group.tables[0], tf.where(lowest < 0, lowest, highest)]
        checked = tf.raw_ops.Assert(condition=(lowest >= 0) & (highest < end), data=wrong)
    else:
        # Otherwise a wrong id would be a row of another table.
        is_wrong = (every < 0) | (every >= tf.gather(tf.constant(group.num_rows, tf.int64), table))
        # One more, so that there is always a first one.
        first = tf.argmax(tf.cast(tf.concat([is_wrong, [True]], 0), tf.int8))
        of, id_ = (tf.concat([t, [-1]], 0)[first] for t in (tf.gather(tf.constant(group.tables), table), every))
        checked = tf.raw_ops.Assert(condition=of < 0, data=[WRONG_ID, of, id_])
    with tf.control_dependencies([checked]):
        return tf.identity(every), table, tf.stack(sizes)
