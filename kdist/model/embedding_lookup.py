"""Embedding tables that a model looks up by rows, so that a step does not need the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import layers_of, table_of
from kdist.layers import Embedding
from kdist.model.phases import Levels
from kdist.model.table_groups import TableGroup


def embedding_layers(model: keras.Model, trainable: Sequence[keras.Variable]) -> dict[int, keras.layers.Embedding]:
    """The embedding layers of `model` by the index of their table in `trainable`."""
    index_of = {id(variable): i for i, variable in enumerate(trainable)}
    layers = [v for v in layers_of(model) if type(v) in (keras.layers.Embedding, Embedding) and v.built]
    return {index_of[id(table_of(v))]: v for v in layers if id(table_of(v)) in index_of}


def why_needed_whole(layer: keras.layers.Embedding) -> str | None:
    """The part of a layer that acts on its whole table; None if there is none."""
    if layer.embeddings_regularizer is not None:
        return "its regularizer"
    if layer.embeddings_constraint is not None:
        return "its constraint"
    if layer.lora_enabled:
        return "LoRA"
    return None


@dataclass(frozen=True)
class Lookup:
    """One call of an embedding layer.

    Attributes:
        table: its position in its group.
        ids: int64 `[n]`, as the model computes them.
        positions: int32 `[n]`, an input: where the rows of these ids are among those that arrive.
    """

    table: int
    ids: tf.Tensor
    positions: tf.Tensor


@dataclass(frozen=True)
class ArrivingRows:
    """What arrives of a group of tables for some lookups: inputs of the graph, each row once, table by table.

    Attributes:
        rows: `[n, ...]`.
        ids: int64 `[n]`: which rows of their tables they are.
        counts: int64 `[number of tables]`: how many are of each table.
        lookups: those that read them.
    """

    rows: tf.Tensor
    ids: tf.Tensor
    counts: tf.Tensor
    lookups: list[Lookup] = field(default_factory=list)

    @staticmethod
    def of(group: TableGroup) -> ArrivingRows:
        placeholder = tf.compat.v1.placeholder
        return ArrivingRows(
            placeholder(group.dtype, [None, *group.row_shape]),
            placeholder(tf.int64, [None]),
            placeholder(tf.int64, [len(group.tables)]),
        )

    @property
    def inputs(self) -> list[tf.Tensor]:
        """Everything that arrives; positions as in `by_table`."""
        return [self.rows, self.ids, self.counts, *(lookup.positions for lookup in self.by_table())]

    def by_table(self) -> list[Lookup]:
        """The lookups, those of one table next to each other."""
        return sorted(self.lookups, key=lambda lookup: lookup.table)


class RowLookups:
    """While active, embedding layers see rows that arrive in place of their tables; used while a function is traced.

    Rows are fetched in rounds: in the first one those whose ids depend on no rows, and so on. Nearly every model needs
    one.

    Args:
        layers: by table index.
        groups: all tables in groups.
        scope: the stateless scope of the model; maps a table to its rows while its layer runs.
        tape: watches the rows; None if nobody asks for their gradients.

    Attributes:
        rounds: what arrives in each, by the index of the group.
        levels: of the graph, in which the rows of a round arrive with the phase of its number + 1.
        hidden: tables that were looked up where gradients cannot be traced, in a loop or a nested function, and why.
    """

    def __init__(
        self,
        layers: Mapping[int, keras.layers.Embedding],
        groups: Sequence[TableGroup],
        scope: keras.StatelessScope,
        tape: tf.GradientTape | None,
    ) -> None:
        self._layers = layers
        self._groups = groups
        self._place = {table: (g, i) for g, group in enumerate(groups) for i, table in enumerate(group.tables)}
        self._scope = scope
        self._tape = tape
        self._graph = tf.compat.v1.get_default_graph()
        self.levels = Levels()
        self.rounds: list[dict[int, ArrivingRows]] = []
        self.hidden: dict[int, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        for index, layer in self._layers.items():
            object.__setattr__(layer, "call", self._call_of(index, layer))
        try:
            yield
        finally:
            for layer in self._layers.values():
                object.__delattr__(layer, "call")

    @property
    def rows(self) -> list[list[tf.Tensor]]:
        """The rows that arrive, by round and group; gradients are computed with respect to them."""
        return [[arriving.rows for arriving in of_round.values()] for of_round in self.rounds]

    def gradients(self, of_rows: Sequence[Sequence[Any]]) -> dict[int, tf.IndexedSlices]:
        """The sparse gradients of tables, by index, from those of `rows`; tables without one are missing.

        Of row-wise tables each row appears once; of others as often as it was looked up, as in Keras.
        """
        parts: dict[int, list[tf.IndexedSlices]] = {}
        for of_round, gradients in zip(self.rounds, of_rows):
            for (g, arriving), gradient in zip(of_round.items(), gradients):
                if gradient is not None:
                    for table, part in _by_table(self._groups[g], arriving, gradient).items():
                        parts.setdefault(table, []).append(part)
        return {table: self._joined(table, of_table) for table, of_table in parts.items()}

    def _joined(self, table: int, parts: list[tf.IndexedSlices]) -> tf.IndexedSlices:
        if len(parts) == 1:
            return parts[0]
        slices = tf.IndexedSlices(tf.concat([p.values for p in parts], 0), tf.concat([p.indices for p in parts], 0))
        return sum_duplicates(slices) if self._groups[self._place[table][0]].is_row_wise else slices

    def _arriving(self, number: int, g: int) -> ArrivingRows:
        """What arrives of a group in a round."""
        while len(self.rounds) <= number:
            self.rounds.append({})
        if g not in self.rounds[number]:
            self.rounds[number][g] = arriving = ArrivingRows.of(self._groups[g])
            self.levels.arrive(arriving.inputs, number + 1)
            if self._tape is not None:
                self._tape.watch(arriving.rows)
        return self.rounds[number][g]

    def _call_of(self, index: int, layer: keras.layers.Embedding) -> Callable[..., Any]:
        original = layer.call
        g, place = self._place[index]

        def call(inputs: Any) -> Any:
            if not isinstance(inputs, tf.Tensor):
                self.hidden[index] = f"ids as {type(inputs).__name__}"
                return original(inputs)
            if tf.compat.v1.get_default_graph() is not self._graph:
                self.hidden[index] = "a lookup inside a loop or a function of its own"
                return original(inputs)
            arriving = self._arriving(self.levels.of(inputs), g)
            ids = tf.reshape(tf.cast(inputs, tf.int64), [-1])
            lookup = Lookup(place, ids, tf.compat.v1.placeholder(tf.int32, ids.shape))
            self.levels.arrive([lookup.positions], self.levels.of(inputs) + 1)
            arriving.lookups.append(lookup)
            # Everything else that the layer does with its table, it does with these rows.
            key = id(table_of(layer))
            table = self._scope.state_mapping[key]
            self._scope.state_mapping[key] = arriving.rows
            try:
                return original(tf.reshape(lookup.positions, tf.shape(inputs)))
            finally:
                self._scope.state_mapping[key] = table

        return call


def _by_table(group: TableGroup, arriving: ArrivingRows, gradient: Any) -> dict[int, tf.IndexedSlices]:
    """The gradients of the tables of a group that were looked up in a round, from that of the rows that arrived."""
    ids = arriving.ids
    if isinstance(gradient, tf.IndexedSlices):
        if group.is_row_wise:
            num_rows = tf.shape(arriving.rows)[0]
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, num_rows)
        else:
            ids, gradient = tf.gather(ids, gradient.indices), gradient.values
    num_tables = len(group.tables)
    if num_tables == 1:
        return {group.tables[0]: tf.IndexedSlices(gradient, ids)}
    split = zip(tf.split(gradient, arriving.counts, num=num_tables), tf.split(ids, arriving.counts, num=num_tables))
    looked_up = {lookup.table for lookup in arriving.lookups}
    return {group.tables[i]: tf.IndexedSlices(*of_table) for i, of_table in enumerate(split) if i in looked_up}


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once."""
    rows, positions = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows)), rows)
