"""Embedding tables that a model looks up by rows, so that a step does not need the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import layers_of, table_of
from kdist.layers import Embedding

#: Fetches rows of a table: unique ids, int64 `[n]` -> `[n, dim]`.
FetchRows = Callable[[tf.Tensor], tf.Tensor]


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


class RowLookups:
    """While active, embedding layers see the rows that were looked up in place of their tables.

    Args:
        layers, fetch: the layers, and functions that fetch rows, by table index.
        scope: the stateless scope of the model; maps a table to its rows while its layer runs.
        tape: watches the rows; None if nobody asks for their gradients.
    """

    def __init__(
        self,
        layers: Mapping[int, keras.layers.Embedding],
        fetch: Mapping[int, FetchRows],
        scope: keras.StatelessScope,
        tape: tf.GradientTape | None,
    ) -> None:
        self._layers = layers
        self._fetch = fetch
        self._scope = scope
        self._tape = tape
        self._graph = tf.compat.v1.get_default_graph()
        self._fetched: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {index: [] for index in layers}
        #: Tables that were looked up where gradients cannot be traced: in a loop or a nested function.
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
    def rows(self) -> dict[int, list[tf.Tensor]]:
        """The rows that were fetched, by table; gradients are computed with respect to them."""
        return {index: [rows for _, rows in fetched] for index, fetched in self._fetched.items()}

    def gradient(self, index: int, gradients: list[Any], *, add_up: bool) -> tf.IndexedSlices | None:
        """The sparse gradient of a table from the gradients of its fetched rows.

        Args:
            index, gradients: of the table, and of its `rows`.
            add_up: whether each row appears once; otherwise as often as it was looked up, as in Keras.
        """
        parts = []
        for gradient, (ids, _) in zip(gradients, self._fetched[index]):
            if gradient is None:
                continue
            if not isinstance(gradient, tf.IndexedSlices):
                parts.append((gradient, ids))
            elif add_up:
                parts.append((tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.size(ids)), ids))
            else:
                parts.append((gradient.values, tf.gather(ids, gradient.indices)))
        if not parts:
            return None
        if len(parts) == 1:
            return tf.IndexedSlices(*parts[0])
        slices = tf.IndexedSlices(tf.concat([g for g, _ in parts], 0), tf.concat([ids for _, ids in parts], 0))
        return sum_duplicates(slices) if add_up else slices

    def _call_of(self, index: int, layer: keras.layers.Embedding) -> Callable[..., Any]:
        original = layer.call

        def call(inputs: Any) -> Any:
            if not isinstance(inputs, tf.Tensor):
                self.hidden[index] = f"ids as {type(inputs).__name__}"
                return original(inputs)
            if tf.compat.v1.get_default_graph() is not self._graph:
                self.hidden[index] = "a lookup inside a loop or a function of its own"
                return original(inputs)
            ids, positions = tf.unique(tf.reshape(tf.cast(inputs, tf.int64), [-1]))
            # Gradients are computed with respect to the rows; fetching them is not part of the model.
            with self._tape.stop_recording() if self._tape is not None else nullcontext():
                rows = self._fetch[index](ids)
            if self._tape is not None:
                self._tape.watch(rows)
            self._fetched[index].append((ids, rows))
            # Everything else that the layer does with its table, it does with these rows.
            key = id(table_of(layer))
            table = self._scope.state_mapping[key]
            self._scope.state_mapping[key] = rows
            try:
                return original(tf.reshape(positions, tf.shape(inputs)))
            finally:
                self._scope.state_mapping[key] = table

        return call


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once."""
    rows, positions = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows)), rows)
