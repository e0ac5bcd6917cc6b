"""Embedding tables that a model looks up by rows, so that a step does not need the whole table.

Tables that are alike form a group, which is looked up and updated as one: a step costs the same for any number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import decays, finds_shapes, layers_of, main_optimizer, stored_dtype, table_of
from kdist.errors import ConfigError
from kdist.layers import DynamicEmbedding, Embedding
from kdist.layers.pooling import PooledLookup
from kdist.model.phases import PhaseOfTensor
from kdist.model.updates import StepUpdates


@dataclass(frozen=True)
class TableGroup:
    """Tables with rows of one dtype and shape, and the same updates. Each row of a group has a number, given by the
    store of the rows.

    Attributes:
        tables: the indices of the tables among the trainable variables.
        num_rows: of each table; 0 if it is dynamic.
        row_shape, dtype: of a row.
        is_row_wise: True if the optimizer updates only rows that were looked up; otherwise there is one table.
        dynamic: the layers of dynamic tables; they differ in their seeds at most.
    """

    tables: tuple[int, ...]
    num_rows: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: str
    is_row_wise: bool
    dynamic: tuple[DynamicEmbedding, ...] = ()


def group_tables(
    layers: Mapping[int, keras.layers.Layer],
    row_wise: frozenset[int],
    updates: StepUpdates,
    with_gradient: frozenset[int],
) -> list[TableGroup]:
    """Groups as large as they can be.

    Args:
        layers: by the index of their table.
        row_wise: tables whose optimizer updates looked-up rows only; any other is a group by itself.
        with_gradient: tables that get a gradient; others are not updated at all.
    """
    alike: dict[Hashable, dict[int, keras.layers.Layer]] = defaultdict(dict)
    for index, layer in layers.items():
        key: Hashable = index
        if index in row_wise:
            table = table_of(layer)
            own = tuple(u for u, update in enumerate(updates.updates) if index in update.variables)
            decayed_by = tuple(decays(optimizer, table) for optimizer in updates.optimizers_of(index))
            key = (table.dtype, tuple(table.shape[1:]), own, decayed_by, index in with_gradient)
            if isinstance(layer, DynamicEmbedding):
                has_bound = layer.eviction is not None and layer.eviction.max_rows is not None
                # A group does not know the table of a row.
                is_alone = has_bound or any(optimizer.clipnorm for optimizer in updates.optimizers_of(index))
                own_index = index if is_alone else None
                key = (*key, layer.row_initializer.kind, layer.admission, layer.eviction, own_index)
        alike[key][index] = layer
    return [_group(found, next(iter(found)) in row_wise) for found in alike.values()]


def _group(layers: Mapping[int, keras.layers.Layer], is_row_wise: bool) -> TableGroup:
    tables = [table_of(layer) for layer in layers.values()]
    num_rows, first = tuple(table.shape[0] for table in tables), tables[0]
    dynamic = tuple(layer for layer in layers.values() if isinstance(layer, DynamicEmbedding))
    return TableGroup(tuple(layers), num_rows, tuple(first.shape[1:]), first.dtype, is_row_wise, dynamic)


def embedding_layers(model: keras.Model, trainable: Sequence[keras.Variable]) -> dict[int, keras.layers.Layer]:
    """The embedding layers of `model` by the index of their table in `trainable`."""
    index_of = {id(variable): i for i, variable in enumerate(trainable)}
    tables = {id(table_of(layer)): layer for layer in _layers_with_tables(model) if layer.built}
    return {index_of[table]: layer for table, layer in tables.items() if table in index_of}


def _layers_with_tables(model: keras.Model) -> list[keras.layers.Layer]:
    kinds = keras.layers.Embedding, Embedding, DynamicEmbedding
    return [layer for layer in layers_of(model) if type(layer) in kinds]


def layers_looked_up(model: keras.Model) -> list[keras.layers.Layer]:
    """The embedding layers, built or not, whose tables may be looked up by rows in training."""
    return [layer for layer in _layers_with_tables(model) if layer.trainable and why_needed_whole(layer) is None]


def why_needed_whole(layer: keras.layers.Layer) -> str | None:
    """The part of a layer that acts on its whole table; None if there is none."""
    if isinstance(layer, DynamicEmbedding):
        return None
    if layer.embeddings_regularizer is not None:
        return "its regularizer"
    if layer.embeddings_constraint is not None:
        return "its constraint"
    return "LoRA" if layer.lora_enabled else None


def check_dynamic_layers(model: keras.Model, row_wise: Sequence[keras.layers.Layer], whole: Mapping[int, str]) -> None:
    """Refuses, with a `ConfigError`, a `kdist.layers.DynamicEmbedding` whose rows a step could not fetch or update.

    Args:
        row_wise: the layers whose tables are looked up and updated by rows.
        whole: the reasons why other tables are needed as a whole.
    """
    found, optimizer = {id(layer) for layer in row_wise}, main_optimizer(model)
    for layer in layers_of(model):
        if isinstance(layer, DynamicEmbedding) and layer.built and id(layer) not in found:
            why = "it is frozen" if not layer.trainable else "; ".join(dict.fromkeys(whole.values()))
            if not why and optimizer.ema_overwrite_frequency:
                why = "the optimizer's ema_overwrite_frequency is for whole variables"
            why = why or f"{type(optimizer).__name__} does not treat each element by itself"
            raise ConfigError(
                f"model {model.name}: the DynamicEmbedding {layer.name} has no rows to train: {why}; it needs the "
                "built-in train step, an optimizer such as Adagrad, Adam or SGD, and lookups outside of loops"
            )


@dataclass(frozen=True)
class Lookup:
    """One call of an embedding layer, with ids, int64 `[n]`, as the model computes them.

    Attributes:
        rows: `[n, ...]`, an input: the rows of these ids.
        ids_per_example: their number, if all examples have equally many.
    """

    layer: keras.layers.Layer
    ids: tf.Tensor
    rows: tf.Tensor
    ids_per_example: int | None = None


class RowLookups:
    """Gives embedding layers, while active, rows that arrive in place of their tables; used while a function is traced.

    Rows are fetched in rounds: in the first one those whose ids depend on no rows, and so on. Nearly every model needs
    one.

    Args:
        layers: built, or built when they are called.
        tape: watches the rows; None if their gradients are not needed.

    Attributes:
        rounds: the lookups of each.
        first_phases: of the tensors of the graph; the rows of a round arrive with the phase of its number + 1.
        hidden: reasons why gradients of a layer cannot be traced, such as a call in a loop, by its `id`.
    """

    def __init__(self, layers: Iterable[keras.layers.Layer], tape: tf.GradientTape | None = None) -> None:
        self._layers = list(layers)
        self._tape = tape
        self._graph = tf.compat.v1.get_default_graph()
        self.first_phases = PhaseOfTensor()
        self.rounds: list[list[Lookup]] = []
        self.hidden: dict[int, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        replaced = [(layer, method) for layer in self._layers for method in _lookup_methods(layer)]
        for layer, method in replaced:
            object.__setattr__(layer, method, self._lookup_of(layer, method))
        try:
            yield
        finally:
            for layer, method in replaced:
                object.__delattr__(layer, method)

    @property
    def rows(self) -> list[list[tf.Tensor]]:
        """The rows that arrive, by round and lookup."""
        return [[lookup.rows for lookup in of_round] for of_round in self.rounds]

    def _lookup_of(self, layer: keras.layers.Layer, method: str) -> Callable[..., Any]:
        original = getattr(layer, method)

        def look_up(ids: tf.Tensor, *, is_ragged: bool) -> tf.Tensor:
            number = self.first_phases.of(ids)
            table = table_of(layer)
            keys = layer.as_keys(ids) if isinstance(layer, DynamicEmbedding) else tf.cast(ids, tf.int64)
            flat_ids, row_shape = tf.reshape(keys, [-1]), table.shape[1:]
            rows = tf.compat.v1.placeholder(stored_dtype(table), [*flat_ids.shape, *row_shape])
            self.rounds += [[] for _ in range(number + 1 - len(self.rounds))]
            of_example = None if is_ragged or ids.shape.rank is None else ids.shape[1:].num_elements()
            self.rounds[number].append(Lookup(layer, flat_ids, rows, of_example))
            self.first_phases.arrive([rows], number + 1)
            if self._tape is not None:
                self._tape.watch(rows)
            # As the layer does with rows of its table, which is not here.
            looked_up = tf.reshape(rows, tf.concat([tf.shape(ids), row_shape], 0))
            looked_up.set_shape([*ids.shape, *row_shape])
            return tf.cast(looked_up, layer.compute_dtype)

        def call(inputs: Any) -> Any:
            if finds_shapes():
                return original(inputs)
            if isinstance(inputs, tf.SparseTensor):
                # Keras's layer looks up row 0 where a sparse tensor holds nothing.
                inputs = tf.sparse.to_dense(inputs)
            if not isinstance(inputs, (tf.Tensor, tf.RaggedTensor)):
                self.hidden[id(layer)] = f"ids as {type(inputs).__name__}"
                return original(inputs)
            if tf.compat.v1.get_default_graph() is not self._graph:
                self.hidden[id(layer)] = "a lookup inside a loop or a function of its own"
                return original(inputs)
            is_ragged = method == _FLAT or isinstance(inputs, tf.RaggedTensor)
            return tf.ragged.map_flat_values(partial(look_up, is_ragged=is_ragged), inputs)

        return call


#: The method that looks up the flat values of ragged ids.
_FLAT = "look_up_flat"


def _lookup_methods(layer: keras.layers.Layer) -> list[str]:
    """The methods of a layer that look up the vectors of ids, and do nothing else."""
    return ["look_up", _FLAT] if isinstance(layer, PooledLookup) else ["call"]


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the gradients of equal rows, so that each row appears once."""
    rows, positions = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows)), rows)
