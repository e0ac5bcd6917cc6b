"""Gradients that wait on the servers until enough are there for one synchronous update.

After TF1's `SyncReplicasOptimizer`, which kept one accumulator per variable and could apply half a gradient. Here a
contribution is a set of tensors that stay on the servers of their parameters; it is applied or forgotten whole, by the
chief's decision, and there is nothing that a worker could wait for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.loss_weights import LossWeights
from kdist.model.updates import ReplicaOutput, scaled
from kdist.parameters.placement.messages import Assigned, BlockUpdates, Layout, Overflow, Pulled, Weight, Wire
from kdist.parameters.store import ParameterStore

#: The tensors of one gradient, on the servers.
Contribution: TypeAlias = "list[tf.Tensor]"
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"


class GradientAggregator:
    """Brings gradients to the servers of `store`, and applies the mean of some of them."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        #: Of each phase.
        self._layouts: dict[int, list[Layout]] = {}

    def bring(self, output: ReplicaOutput, pulled: Pulled) -> Contribution:
        """Moves what `ParameterStore.push` takes to the servers, not clipped; traced in a worker's call."""
        return self.deliver(self.pack(output, pulled), output.phase)

    def pack(self, output: ReplicaOutput, pulled: Pulled) -> list[tf.Tensor]:
        """What `deliver` moves, on the worker."""
        all_fused = self._store.fuse(weighted(self._store, output, pulled))
        self._layouts[output.phase] = [fused.layout for fused in all_fused]
        return [fused.tensor for fused in all_fused]

    def deliver(self, packed: Sequence[tf.Tensor], phase: int = 0) -> Contribution:
        """Moves what was packed in a phase to the servers."""
        devices = [self._store.device_of(layout) for layout in self._layouts[phase]]
        tensors = []
        for tensor, device in zip(packed, devices):
            with tf.device(device):
                tensors.append(tf.identity(tensor))
        return tensors

    def apply_mean(self, contributions: Sequence[Contribution], phase: int = 0) -> tf.Tensor:
        """The updates of a phase by the mean of `contributions`, traced in the chief; returns what a push does."""
        means: BlockUpdates = {}
        for layout, tensors in zip(self._layouts[phase], zip(*contributions)):
            with tf.device(self._store.device_of(layout)):
                if self._has_one_mean(layout):
                    # One operation for all variables of a server, however many workers there are.
                    means |= layout.split(_mean_of([Wire.unpack(tensor, layout.dtype) for tensor in tensors]))
                    continue
                of_each = [layout.split(tensor) for tensor in tensors]
                for key in of_each[0]:
                    means[key] = self._mean(key, [changes[key] for changes in of_each])
        means = unweighted(self._store, means, len(contributions))
        clipped: dict[int, Gradient] = {}
        for update in self._store.updates.in_phase(phase):
            own = {block: mean for block, mean in means.items() if block in self._store.blocks_in(update)}
            clipped |= self._clipped(own, self._store.updates.groups[update.group].optimizer)
        return self._store.apply(means | clipped, phase)

    def _mean(self, key: int | Assigned | Overflow | Weight, changes: Sequence[Gradient]) -> Gradient:
        if isinstance(key, Overflow):
            # What has overflowed in one of them does so in the mean.
            return tf.reduce_max(changes)
        if not isinstance(changes[0], tf.IndexedSlices):
            return _together(self._aggregation(key), changes)
        values = tf.concat([change.values for change in changes], 0) / len(changes)
        rows = tf.IndexedSlices(values, tf.concat([change.indices for change in changes], 0))
        return sum_duplicates(rows) if self._store.blocks[key].is_row_wise else rows

    def _clipped(self, gradients: dict[int, Gradient], optimizer: keras.optimizers.Optimizer) -> dict[int, Gradient]:
        """Clips as the optimizer would clip the whole gradients: norms are summed up over servers, on the chief."""
        scale: Callable[[tf.Tensor], tf.Tensor]
        if optimizer.clipnorm:
            return self._clipped_each(gradients, optimizer.clipnorm)
        if optimizer.global_clipnorm:
            squares = [self._square(block, gradient) for block, gradient in gradients.items()]
            scale = _scaling(squares, optimizer.global_clipnorm)
        elif optimizer.clipvalue:
            limit = optimizer.clipvalue
            scale = partial(tf.clip_by_value, clip_value_min=-limit, clip_value_max=limit)
        else:
            return {}
        clipped: dict[int, Gradient] = {}
        for block, gradient in gradients.items():
            with tf.device(self._device(block)):
                clipped[block] = _map_values(scale, gradient)
        return clipped

    def _clipped_each(self, gradients: dict[int, Gradient], limit: float) -> dict[int, Gradient]:
        """Clips the gradient of each variable by its own norm, whichever servers have parts of it."""
        blocks, shards = self._store.blocks, self._store.shards
        by_shard: dict[int, Gradient] = {}
        squares: dict[int, list[tf.Tensor]] = defaultdict(list)
        for block, gradient in gradients.items():
            with tf.device(self._device(block)):
                by_shard |= blocks.split(block, gradient)
            for shard in blocks[block].shards:
                squares[shards[shard].variable].append(self._square(block, by_shard[shard]))
        scale = {variable: _scaling(parts, limit) for variable, parts in squares.items()}
        clipped: dict[int, Gradient] = {}
        for block in gradients:
            with tf.device(self._device(block)):
                scaled = {i: _map_values(scale[shards[i].variable], by_shard[i]) for i in blocks[block].shards}
                clipped[block] = blocks.join(block, scaled)
        return clipped

    def _square(self, block: int, gradient: Gradient) -> tf.Tensor:
        """The sum of squares of a block's gradient, or of a part of it, on the caller."""
        with tf.device(self._device(block)):
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            square = tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))
        return tf.identity(square)

    def _has_one_mean(self, layout: Layout) -> bool:
        """Whether a fused tensor can be averaged without unpacking it."""
        has_others = any(isinstance(key, Overflow) or self._aggregation(key) != "mean" for key in layout.shapes)
        return layout.dtype.is_floating and not layout.row_shapes and not has_others

    def _aggregation(self, key: int | Assigned | Weight) -> str:
        return "mean" if isinstance(key, (Assigned, Weight)) else self._store.blocks[key].aggregation

    def _device(self, block: int) -> str:
        return self._store.devices[self._store.blocks[block].server]


def weighted(store: ParameterStore, output: ReplicaOutput, pulled: Pulled) -> BlockUpdates:
    """As `ParameterStore.updates_of`, times the weights that a replica's part has in the mean of all, with these."""
    gradients, state = _arriving(store.wire, output.weight), _arriving(store.wire, output.state_weight)
    if output.weight is not None and store.updates.weights is LossWeights.EXAMPLES:
        state = gradients
    changes = store.updates_of(replace(output, gradients=[scaled(g, gradients) for g in output.gradients]), pulled)
    changes |= {key: scaled(changes[key], state) for key in changes if _is_mean_of_state(store, key, changes[key])}
    for server in range(len(store.devices)):
        if gradients is not None:
            changes[Weight(server)] = gradients
        if state is not None and state is not gradients:
            changes[Weight(server, of_state=True)] = state
    return changes


def unweighted(store: ParameterStore, means: BlockUpdates, num_replicas: int) -> BlockUpdates:
    """What replicas apply together, from the means of what `weighted` makes of each."""
    weights = {key: means[key] for key in means if isinstance(key, Weight)}
    changes = {key: mean for key, mean in means.items() if key not in weights}
    for server, device in enumerate(store.devices):
        with tf.device(device or None):
            factors = {
                key.of_state: tf.math.divide_no_nan(1.0, weights[key]) for key in weights if key.server == server
            }
            if store.updates.weights is LossWeights.SUM:
                factors[False] = tf.constant(float(num_replicas))
            of_state = factors.get(True, factors.get(False) if Weight(server) in weights else None)
            for key, change in changes.items():
                if isinstance(key, Overflow) or store.blocks[_block(key)].server != server:
                    continue
                if _is_mean_of_state(store, key, change):
                    changes[key] = scaled(change, of_state)
                elif isinstance(key, int) and store.blocks[key].is_parameter:
                    changes[key] = scaled(change, factors.get(False))
    return changes


def _arriving(wire: Wire, weight: tf.Tensor | None) -> tf.Tensor | None:
    """A weight as it is when it has travelled."""
    return None if weight is None else wire.unpack(wire.pack(weight), weight.dtype)


def _block(key: int | Assigned) -> int:
    return key.block if isinstance(key, Assigned) else key


def _is_mean_of_state(store: ParameterStore, key: Any, change: Any) -> bool:
    """Whether replicas apply the mean of what each has done to state, or has assigned to parameters."""
    if isinstance(key, Assigned):
        return True
    is_state = isinstance(key, int) and not store.blocks[key].is_parameter
    return is_state and store.blocks[key].aggregation == "mean" and change.dtype.is_floating


def _scaling(squares: Sequence[tf.Tensor], limit: float) -> Callable[[tf.Tensor], tf.Tensor]:
    """Scales values so that the norm whose `squares` these are is at most `limit`."""
    factor = limit / tf.maximum(tf.sqrt(tf.add_n(squares)), limit)
    return lambda values: values * tf.cast(factor, values.dtype)


def _map_values(change: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices)
    return change(gradient)


def _together(aggregation: str, changes: Sequence[tf.Tensor]) -> tf.Tensor:
    """The mean, the sum or the first of changes, as `Block.aggregation` says."""
    if aggregation == "first" or changes[0].dtype == tf.bool:
        return changes[0]
    return tf.add_n(list(changes)) if aggregation == "sum" else _mean_of(changes)


def _mean_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The mean of tensors of one shape; of whole numbers the nearest one."""
    if tensors[0].dtype.is_floating:
        return tf.add_n(list(tensors)) / len(tensors)
    return tf.cast(tf.round(tf.add_n([tf.cast(t, tf.float64) for t in tensors]) / len(tensors)), tensors[0].dtype)
