"""Embedding tables that a model looks up by rows, so that a step does not need the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import layers_of, main_optimizer, table_of
from kdist.errors import ConfigError
from kdist.layers import DynamicEmbedding, Embedding
from kdist.layers.pooled_lookup import PooledLookup
from kdist.model.phases import Levels
from kdist.model.table_groups import TableGroup


def embedding_layers(model: keras.Model, trainable: Sequence[keras.Variable]) -> dict[int, keras.layers.Layer]:
    """The embedding layers of `model` by the index of their table in `trainable`."""
    index_of = {id(variable): i for i, variable in enumerate(trainable)}
    kinds = keras.layers.Embedding, Embedding, DynamicEmbedding
    layers = [layer for layer in layers_of(model) if type(layer) in kinds and layer.built]
    return {index_of[id(table_of(layer))]: layer for layer in layers if id(table_of(layer)) in index_of}


def why_needed_whole(layer: keras.layers.Layer) -> str | None:
    """The part of a layer that acts on its whole table; None if there is none."""
    if isinstance(layer, DynamicEmbedding):
        return None
    if layer.embeddings_regularizer is not None:
        return "its regularizer"
    if layer.embeddings_constraint is not None:
        return "its constraint"
    if layer.lora_enabled:
        return "LoRA"
    return None


def check_dynamic_layers(model: keras.Model, row_wise: Sequence[keras.layers.Layer], whole: Mapping[int, str]) -> None:
    """Refuses, with a `ConfigError`, a `kdist.layers.DynamicEmbedding` whose rows a step could not fetch or update.

    Args:
        row_wise: the layers of whose tables rows are looked up and updated.
        whole: why other tables are needed as a whole.
    """
    found = {id(layer) for layer in row_wise}
    for layer in layers_of(model):
        if isinstance(layer, DynamicEmbedding) and layer.built and id(layer) not in found:
            why = "it is frozen" if not layer.trainable else "; ".join(dict.fromkeys(whole.values()))
            optimizer = main_optimizer(model)
            if not why and optimizer.ema_overwrite_frequency:
                why = "the optimizer's ema_overwrite_frequency is for whole variables"
            why = why or f"{type(optimizer).__name__} does not treat each element by itself"
            raise ConfigError(
                f"model {model.name}: the DynamicEmbedding {layer.name} has no rows to train: {why}; it needs the "
                "built-in train step, an optimizer such as Adagrad, Adam or SGD, and lookups outside of loops"
            )


@dataclass(frozen=True)
class Lookup:
    """One call of an embedding layer.

    Attributes:
        table: its position in its group.
        ids: int64 `[n]`, as the model computes them.
        rows: `[n, ...]`, an input: the rows of these ids.
    """

    table: int
    ids: tf.Tensor
    rows: tf.Tensor


@dataclass(frozen=True)
class ArrivingRows:
    """What arrives of a group of tables for some lookups: inputs of the graph.

    Attributes:
        numbers: int64 `[m]`: which rows of the group were fetched, each once, table by table.
        counts: int32 `[tables]`: how many of them are of each table that these lookups read.
        places: int32 `[n]`: for each id of all lookups the place of its row in `numbers`.
        lookups: those that read them.
    """

    numbers: tf.Tensor
    counts: tf.Tensor
    places: tf.Tensor
    lookups: list[Lookup] = field(default_factory=list)

    @staticmethod
    def of_no_lookup() -> ArrivingRows:
        dtypes = tf.int64, tf.int32, tf.int32
        return ArrivingRows(*(tf.compat.v1.placeholder(dtype, [None]) for dtype in dtypes))

    @property
    def by_table(self) -> list[Lookup]:
        """The lookups, those of one table next to each other."""
        return sorted(self.lookups, key=lambda lookup: lookup.table)

    @property
    def inputs(self) -> list[tf.Tensor]:
        """Everything that arrives; rows in the order of `by_table`."""
        return [self.numbers, self.counts, self.places, *(lookup.rows for lookup in self.by_table)]


class RowLookups:
    """While active, embedding layers see rows that arrive in place of their tables; used while a function is traced.

    Rows are fetched in rounds: in the first one those whose ids depend on no rows, and so on. Nearly every model needs
    one.

    Args:
        layers: by table index.
        groups: all tables in groups.
        tape: watches the rows; None if nobody asks for their gradients.

    Attributes:
        rounds: what arrives in each, by the index of the group.
        levels: of the graph, in which the rows of a round arrive with the phase of its number + 1.
        hidden: tables that were looked up where gradients cannot be traced, in a loop or a nested function, and why.
    """

    def __init__(
        self,
        layers: Mapping[int, keras.layers.Layer],
        groups: Sequence[TableGroup],
        tape: tf.GradientTape | None = None,
    ) -> None:
        self._layers = layers
        self._groups = groups
        self._place = {table: (g, i) for g, group in enumerate(groups) for i, table in enumerate(group.tables)}
        self._tape = tape
        self._graph = tf.compat.v1.get_default_graph()
        self.levels = Levels()
        self.rounds: list[dict[int, ArrivingRows]] = []
        self.hidden: dict[int, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        for index, layer in self._layers.items():
            object.__setattr__(layer, _lookup_method(layer), self._lookup_of(index, layer))
        try:
            yield
        finally:
            for layer in self._layers.values():
                object.__delattr__(layer, _lookup_method(layer))

    @property
    def rows(self) -> list[list[list[tf.Tensor]]]:
        """The rows that arrive, by round, group and lookup; gradients are computed with respect to them."""
        return [[[lookup.rows for lookup in a.by_table] for a in of_round.values()] for of_round in self.rounds]

    def gradients(self, of_rows: Sequence[Sequence[Sequence[Any]]]) -> dict[int, tf.IndexedSlices]:
        """The sparse gradients of tables, by index, from those of `rows`; tables without one are missing.

        Their rows have the numbers that they have in their groups. Of row-wise tables each row appears once; of others
        as often as it was looked up, as in Keras.
        """
        parts: dict[int, list[tf.IndexedSlices]] = {}
        for of_round, gradients in zip(self.rounds, of_rows):
            for (g, arriving), of_lookups in zip(of_round.items(), gradients):
                if any(gradient is not None for gradient in of_lookups):
                    for table, part in _by_table(self._groups[g], arriving, of_lookups).items():
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
            self.rounds[number][g] = ArrivingRows.of_no_lookup()
            self.levels.arrive(self.rounds[number][g].inputs, number + 1)
        return self.rounds[number][g]

    def _lookup_of(self, index: int, layer: keras.layers.Layer) -> Callable[..., Any]:
        original = getattr(layer, _lookup_method(layer))
        g, place = self._place[index]
        group = self._groups[g]

        def look_up(ids: tf.Tensor) -> tf.Tensor:
            number = self.levels.of(ids)
            arriving = self._arriving(number, g)
            keys = layer.as_keys(ids) if isinstance(layer, DynamicEmbedding) else tf.cast(ids, tf.int64)
            flat_ids = tf.reshape(keys, [-1])
            rows = tf.compat.v1.placeholder(group.dtype, [*flat_ids.shape, *group.row_shape])
            arriving.lookups.append(Lookup(place, flat_ids, rows))
            self.levels.arrive([rows], number + 1)
            if self._tape is not None:
                self._tape.watch(rows)
            # What the layer does with the rows; the table is not here.
            looked_up = tf.reshape(rows, tf.concat([tf.shape(ids), group.row_shape], 0))
            looked_up.set_shape([*ids.shape, *group.row_shape])
            return tf.cast(looked_up, layer.compute_dtype)

        def call(inputs: Any) -> Any:
            if isinstance(inputs, tf.SparseTensor):
                # Keras's layer looks up row 0 where a sparse tensor holds nothing.
                inputs = tf.sparse.to_dense(inputs)
            if not isinstance(inputs, (tf.Tensor, tf.RaggedTensor)):
                self.hidden[index] = f"ids as {type(inputs).__name__}"
                return original(inputs)
            if tf.compat.v1.get_default_graph() is not self._graph:
                self.hidden[index] = "a lookup inside a loop or a function of its own"
                return original(inputs)
            return tf.ragged.map_flat_values(look_up, inputs)

        return call


def _lookup_method(layer: keras.layers.Layer) -> str:
    """What a layer calls with ids to get their vectors, and does nothing else in."""
    return "look_up" if isinstance(layer, PooledLookup) else "call"


def _by_table(group: TableGroup, arriving: ArrivingRows, of_lookups: Sequence[Any]) -> dict[int, tf.IndexedSlices]:
    """The gradients of the tables of a group that were looked up in a round, from those of each lookup's rows."""
    lookups = arriving.by_table
    gradient = tf.concat(
        [
            tf.zeros_like(lookup.rows) if of_lookup is None else tf.convert_to_tensor(of_lookup)
            for lookup, of_lookup in zip(lookups, of_lookups)
        ],
        0,
    )
    if not group.is_row_wise:
        return {group.tables[0]: tf.IndexedSlices(gradient, tf.gather(arriving.numbers, arriving.places))}
    gradient = tf.math.unsorted_segment_sum(gradient, arriving.places, tf.size(arriving.numbers))
    tables = [group.tables[i] for i in dict.fromkeys(lookup.table for lookup in lookups)]
    if len(tables) == 1:
        return {tables[0]: tf.IndexedSlices(gradient, arriving.numbers)}
    split = (tf.split(tensor, arriving.counts, num=len(tables)) for tensor in (gradient, arriving.numbers))
    return {table: tf.IndexedSlices(*of_table) for table, *of_table in zip(tables, *split)}


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once."""
    rows, positions = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows)), rows)
