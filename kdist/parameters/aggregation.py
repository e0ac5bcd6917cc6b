"""Gradients that wait on the servers until enough are there for one synchronous update.

After TF1's `SyncReplicasOptimizer`, which kept one accumulator per variable and could apply half a gradient. Here a
contribution is a set of tensors that stay on the servers of their parameters; it is applied or forgotten whole, by the
chief's decision, and there is nothing that a worker could wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from kdist.model.embedding_lookup import sum_duplicates
from kdist.parameters.store import Change, ParameterStore, Pulled
from kdist.parameters.transport import Layout

#: The tensors of one gradient, on the servers.
Contribution: TypeAlias = "list[tf.Tensor]"


class GradientAggregator:
    """Brings gradients to the servers of `store`, and applies the mean of some of them."""

    def __init__(self, store: ParameterStore, optimizer: keras.optimizers.Optimizer) -> None:
        self._store = store
        self._optimizer = optimizer
        self._layouts: list[Layout] = []

    def bring(self, gradients: Sequence[Change], state: Sequence[Change], pulled: Pulled) -> Contribution:
        """Moves a gradient, not clipped, to the servers; called while a worker's call is traced.

        Args: as those of `ParameterStore.push`.
        """
        all_fused = self._store.fuse(self._store.changes(gradients, state, pulled))
        self._layouts = [fused.layout for fused in all_fused]
        tensors = []
        for fused in all_fused:
            with tf.device(self._store.device_of(fused.layout)):
                tensors.append(tf.identity(fused.tensor))
        return tensors

    def apply_mean(self, contributions: Sequence[Contribution]) -> tf.Tensor:
        """One update by the mean of `contributions`; called while a function of the chief is traced.

        Returns:
            Scalar int64, the global step of this update.
        """
        means: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for layout, tensors in zip(self._layouts, zip(*contributions)):
            with tf.device(self._store.device_of(layout)):
                of_each = [layout.split(tensor) for tensor in tensors]
                for block in of_each[0]:
                    means[block] = self._mean(block, [changes[block] for changes in of_each])
        return self._store.apply(self._clipped(means))

    def _mean(self, block: int, changes: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor | tf.IndexedSlices:
        if not isinstance(changes[0], tf.IndexedSlices):
            return _mean_of(changes)
        values = tf.concat([change.values for change in changes], 0) / len(changes)
        rows = tf.IndexedSlices(values, tf.concat([change.indices for change in changes], 0))
        return sum_duplicates(rows) if self._store.blocks[block].is_row_wise else rows

    def _clipped(self, means: dict[int, tf.Tensor | tf.IndexedSlices]) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        """Clips as the optimizer would clip the whole gradients: norms are summed up over servers, on the chief."""
        optimizer = self._optimizer
        gradients = {i: mean for i, mean in means.items() if self._store.blocks[i].is_parameter}
        if optimizer.clipnorm:
            return means | self._clipped_each(gradients, optimizer.clipnorm)
        if optimizer.global_clipnorm:
            norm = tf.sqrt(tf.add_n(list(self._squares(gradients).values())))
            factor = optimizer.global_clipnorm / tf.maximum(norm, optimizer.global_clipnorm)
            return means | self._map(gradients, lambda values: values * tf.cast(factor, values.dtype))
        if optimizer.clipvalue:
            limit = optimizer.clipvalue
            return means | self._map(gradients, lambda values: tf.clip_by_value(values, -limit, limit))
        return means

    def _clipped_each(
        self, gradients: dict[int, tf.Tensor | tf.IndexedSlices], limit: float
    ) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        """Clips the gradient of each variable by its own norm, whichever servers have parts of it."""
        store = self._store
        by_shard: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for block, gradient in gradients.items():
            with tf.device(self._device(block)):
                by_shard |= store.blocks.split(block, gradient)
        block_of = {shard: block for block in gradients for shard in store.blocks[block].shards}
        squares: dict[int, list[tf.Tensor]] = defaultdict(list)
        for shard, gradient in by_shard.items():
            squares[store.shards[shard].variable].append(self._square(block_of[shard], gradient))
        factors = {variable: limit / tf.maximum(tf.sqrt(tf.add_n(parts)), limit) for variable, parts in squares.items()}
        clipped: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for block in gradients:
            with tf.device(self._device(block)):
                scaled = {
                    shard: _times(by_shard[shard], factors[store.shards[shard].variable])
                    for shard in store.blocks[block].shards
                }
                clipped[block] = store.blocks.join(block, scaled)
        return clipped

    def _squares(self, gradients: dict[int, tf.Tensor | tf.IndexedSlices]) -> dict[int, tf.Tensor]:
        """The sum of squares of each block's gradient, on the caller."""
        return {block: self._square(block, gradient) for block, gradient in gradients.items()}

    def _square(self, block: int, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        with tf.device(self._device(block)):
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            square = tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))
        return tf.identity(square)

    def _map(
        self, gradients: dict[int, tf.Tensor | tf.IndexedSlices], change: Callable[[tf.Tensor], tf.Tensor]
    ) -> dict[int, tf.Tensor | tf.IndexedSlices]:
        changed: dict[int, tf.Tensor | tf.IndexedSlices] = {}
        for i, gradient in gradients.items():
            with tf.device(self._device(i)):
                if isinstance(gradient, tf.IndexedSlices):
                    changed[i] = tf.IndexedSlices(change(gradient.values), gradient.indices)
                else:
                    changed[i] = change(gradient)
        return changed

    def _device(self, block: int) -> str:
        return self._store.devices[self._store.blocks[block].server]


def _times(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices)
    return gradient * tf.cast(factor, gradient.dtype)


def _mean_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The mean of tensors of one shape; of whole numbers the nearest one, of bools what the first says."""
    if tensors[0].dtype == tf.bool:
        return tensors[0]
    if tensors[0].dtype.is_floating:
        return tf.add_n(list(tensors)) / len(tensors)
    return tf.cast(tf.round(tf.add_n([tf.cast(t, tf.float64) for t in tensors]) / len(tensors)), tensors[0].dtype)
