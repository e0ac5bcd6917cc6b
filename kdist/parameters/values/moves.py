"""Moves all values from the servers of one store to those of another, from server to server.

Nothing passes through the chief but functions. What a server sends at once, and another one takes, has at most
`StoredShard.slice_bytes`; the old values stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import tensorflow as tf

from kdist._compat.tensorflow import function_of_its_own
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.placement.messages import cut
from kdist.parameters.tables.dynamic_table import IDS, TABLES, DynamicTable
from kdist.parameters.values.dynamic_values import DynamicValues
from kdist.parameters.values.named_values import NamedValues, Slice, assign_elements
from kdist.parameters.values.slices import ChosenSlices, ServerRows, assign_run, read_run

#: A value's rows where they are, and where they go.
_Move = tuple[Slice, Slice]
#: Elements up to which it takes longer to trace a move than to find each element of it.
_SMALL = 1 << 14


def move_values(old: NamedValues, new: NamedValues) -> None:
    """Gives all values, except those with copies, to variables on other servers."""
    of_pairs: dict[tuple[str, str], list[_Move]] = defaultdict(list)
    for move in _moves(old, new):
        of_pairs[move[0].variable.device, move[1].variable.device].append(move)
    for moves in of_pairs.values():
        groups = cut(moves, lambda move: prod(move[1].own_shape) * move[1].variable.dtype.size, StoredShard.slice_bytes)
        _traced(groups)()


def _moves(old: NamedValues, new: NamedValues) -> Iterator[_Move]:
    """The rows of all values that are together both where they are and where they go."""
    sources: dict[str, list[Slice]] = defaultdict(list)
    for each in old.slices():
        sources[each.name].append(each)
    for target in new.slices():
        if target.name in new.copies:
            continue
        for source in sources[target.name]:
            start, stop = max(source.start, target.start), min(source.stop, target.stop)
            if not target.shape or start < stop:
                yield _part(source, start, stop), _part(target, start, stop)


def _part(each: Slice, start: int, stop: int) -> Slice:
    row_size = prod(each.shape[1:])
    return replace(each, start=start, stop=stop, offset=each.offset + (start - each.start) * row_size)


def _traced(groups: Sequence[Sequence[_Move]]) -> Callable[[], object]:
    """A function that moves groups of rows from one server to another, one after the other."""

    def move() -> None:
        before: list[tf.Operation] = []
        for group in groups:
            with tf.control_dependencies(before):
                parcels = _parcels(group)
                with tf.device(group[0][0].variable.device):
                    sent = list(map(_read, parcels))
                with tf.device(group[0][1].variable.device):
                    before = list(map(_assign, parcels, sent))

    return tf.function(move, autograph=False).get_concrete_function()


def _parcels(group: Sequence[_Move]) -> list[list[_Move]]:
    """The rows that are read, sent and assigned at once: those of a value, or of many small ones of two vectors.

    A deep model has hundreds of small values; to trace operations for each would take longer than to move them.
    """
    found: dict[tuple[int, ...], list[_Move]] = defaultdict(list)
    for i, (source, target) in enumerate(group):
        are_vectors = source.variable.shape.rank == target.variable.shape.rank == 1
        is_small = are_vectors and prod(target.own_shape) <= _SMALL
        found[(id(source.variable), id(target.variable)) if is_small else (i,)].append((source, target))
    return list(found.values())


def _read(parcel: Sequence[_Move]) -> tf.Tensor:
    if len(parcel) == 1:
        return read_run([parcel[0][0]])[0]
    return tf.gather(parcel[0][0].variable.read_value_no_copy(), _elements([source for source, _ in parcel]))


def _assign(parcel: Sequence[_Move], value: tf.Tensor) -> tf.Operation:
    if len(parcel) == 1:
        return assign_run([parcel[0][1]], [value])
    return assign_elements(parcel[0][1].variable, _elements([target for _, target in parcel]), value)


def _elements(slices: Sequence[Slice]) -> tf.Tensor:
    """The elements of slices in the vector that holds them, int64 `[n]`."""
    places = [each.place_in(each.variable.shape) for each in slices]
    starts, stops = ([getattr(place, end) for place in places] for end in ("start", "stop"))
    return tf.raw_ops.RaggedRange(
        starts=tf.constant(starts, tf.int64), limits=tf.constant(stops, tf.int64), deltas=tf.constant(1, tf.int64)
    ).rt_dense_values


def move_rows(old: DynamicValues, new: DynamicValues) -> None:
    """Gives the rows of all dynamic tables to tables on other servers, which have none."""
    for source, target in zip(old.slices, new.slices):
        # Each is traced once, whoever gives it rows.
        takers = {
            table: function_of_its_own(table.take_new) for table in target.tables if isinstance(table, DynamicTable)
        }
        for rows in source.rows:
            give = _giver(source, rows, takers)
            for start in range(0, int(rows.num_rows.numpy()), source.slice_rows):
                for table in range(len(source.names)):
                    give(tf.constant(start, tf.int64), tf.constant(table, tf.int32))


def _giver(
    source: ChosenSlices, rows: ServerRows, takers: Mapping[DynamicTable, Callable[..., object]]
) -> Callable[..., object]:
    """A function that gives rows of a table, from a row on, to the servers of their ids, by what takes them there."""
    columns = [column for column in rows.stored if column != TABLES]
    any_taker = next(iter(takers))

    def give(start: tf.Tensor, table: tf.Tensor) -> None:
        with tf.device(rows.device):
            chosen = source.rows_of(rows, start, table)
            servers = any_taker.servers_of(rows.stored[IDS].sparse_read(chosen), table)
            of_servers = tf.dynamic_partition(chosen, servers, any_taker.num_servers)
        for taker, take in takers.items():
            with tf.device(rows.device):
                sent = {column: rows.stored[column].sparse_read(of_servers[taker.server]) for column in columns}
            with tf.device(taker.device):
                take(table, sent)

    specs = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)
    return tf.function(give, autograph=False).get_concrete_function(*specs)
