"""Gradients that wait on the servers until enough are there for one synchronous update.

After TF1's `SyncReplicasOptimizer`, which kept one accumulator per variable and could apply half a gradient. Here a
contribution is a set of tensors that stay on the servers of their parameters; it is applied or forgotten whole, by the
chief's decision, and there is nothing that a worker could wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import tensorflow as tf

from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.loss_weights import Term
from kdist.model.optimizer import Gradient, clip_gradients
from kdist.model.updates import ReplicaOutput, scale
from kdist.parameters.placement.messages import (
    Assigned,
    BlockUpdates,
    Layout,
    Message,
    Overflow,
    Pulled,
    UpdateKey,
    Weight,
    Wire,
)
from kdist.parameters.store import ParameterStore

#: The tensors of one gradient, on the servers.
Contribution: TypeAlias = "list[tf.Tensor]"


class GradientAggregator:
    """Brings gradients to the servers of `store`, and applies the mean of some of them."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        #: Of each phase.
        self._layouts: dict[int, list[Layout]] = {}

    def send(self, output: ReplicaOutput, pulled: Pulled) -> Contribution:
        """Moves a gradient, not clipped, to the servers; takes the same as `ParameterStore.push`; traced in a call."""
        return self.send_packed(self.pack(output, pulled), output.phase)

    def pack(self, output: ReplicaOutput, pulled: Pulled) -> list[Message]:
        """A gradient, fused on the worker."""
        return self._store.fuse(weighted(self._store, output, pulled))

    def send_packed(self, messages: Sequence[Message], phase: int = 0) -> Contribution:
        """Moves the packed gradient of a phase to the servers."""
        self._layouts[phase] = [layout for _, layout in messages]
        tensors = []
        for tensor, layout in messages:
            with tf.device(layout.device):
                tensors.append(tf.identity(tensor))
        return tensors

    def apply_mean(self, contributions: Sequence[Contribution], phase: int = 0) -> tf.Tensor:
        """Applies the mean of `contributions` to a phase, traced in the chief; returns the same as a push."""
        means: BlockUpdates = {}
        for layout, tensors in zip(self._layouts[phase], zip(*contributions)):
            with tf.device(layout.device):
                if self._has_one_mean(layout):
                    # One operation for all variables of a server, however many workers there are.
                    total = tf.add_n([Wire.unpack(tensor, layout.dtype) for tensor in tensors])
                    means |= layout.split(of_total("mean", total, len(tensors), layout.dtype))
                    continue
                of_each = [layout.split(tensor) for tensor in tensors]
                for key in of_each[0]:
                    means[key] = self._joined(key, [changes[key] for changes in of_each])
        return self._store.apply(finished(self._store, means, len(contributions), phase), phase)

    def _joined(self, key: UpdateKey, changes: Sequence[Gradient]) -> Gradient:
        if isinstance(key, Overflow):
            # What has overflowed in one of them does so in the mean.
            return tf.reduce_max(changes)
        if isinstance(changes[0], tf.IndexedSlices):
            values = tf.concat([change.values for change in changes], 0) / len(changes)
            rows = tf.IndexedSlices(values, tf.concat([change.indices for change in changes], 0))
            return sum_duplicates(rows) if self._store.blocks[key].is_row_wise else rows
        dtype = changes[0].dtype
        if (rule := rule_of(self._store, key, dtype)) == "first":
            return changes[0]
        total = tf.add_n([tf.cast(change, dtype_of_total(rule, dtype)) for change in changes])
        return of_total(rule, total, len(changes), dtype)

    def _has_one_mean(self, layout: Layout) -> bool:
        """Tells whether a fused tensor can be averaged without unpacking it."""
        if not layout.dtype.is_floating or layout.row_shapes:
            return False
        others = [key for key in layout.shapes if isinstance(key, Overflow)]
        return not others and {rule_of(self._store, key, layout.dtype) for key in layout.shapes} == {"mean"}


def rule_of(store: ParameterStore, key: UpdateKey, dtype: tf.DType) -> str:
    """The rule by which the changes of several replicas become one: `mean`, `sum` or `first`."""
    if isinstance(key, (Assigned, Weight)):
        return "mean"
    return "first" if dtype == tf.bool else store.blocks[key].aggregation


def dtype_of_total(rule: str, dtype: tf.DType) -> tf.DType:
    """The dtype in which changes of replicas are added up: small whole numbers have a mean, but no room for a sum."""
    return dtype if rule != "mean" or dtype.is_floating else tf.float64


def of_total(rule: str, total: tf.Tensor, num_replicas: int, dtype: tf.DType) -> tf.Tensor:
    """The change that replicas apply, from the sum of theirs; a mean of whole numbers is rounded to the nearest."""
    if rule == "mean":
        total /= num_replicas
    return tf.cast(total if dtype.is_floating or rule != "mean" else tf.round(total), dtype)


def weighted(store: ParameterStore, output: ReplicaOutput, pulled: Pulled) -> BlockUpdates:
    """As `ParameterStore.updates_of`, times the weight of the replica in the mean of all; with that weight."""
    gradients, state = _arriving(store.wire, output.weight), _arriving(store.wire, output.state_weight)
    if output.weight is not None and store.updates.loss is Term.MEAN:
        state = gradients
    changes = store.updates_of(replace(output, gradients=[scale(g, gradients) for g in output.gradients]), pulled)
    changes |= {key: scale(changes[key], state) for key in changes if _is_mean_of_state(store, key, changes[key])}
    for server in store.servers:
        if gradients is not None:
            changes[Weight(server)] = gradients
        if state is not None and state is not gradients:
            changes[Weight(server, of_state=True)] = state
    return changes


def finished(store: ParameterStore, means: BlockUpdates, num_replicas: int, phase: int) -> BlockUpdates:
    """The changes that replicas apply together in a phase, clipped, from the means of their weighted changes."""
    changes = _unweighted(store, means, num_replicas)
    blocks, clipped = store.blocks, dict[int, Gradient]()
    for update in store.updates.in_phase(phase):
        optimizer, in_update = store.updates.groups[update.group].optimizer, store.blocks.in_update(update)
        own = {b: changes[b] for b in changes if b in in_update}
        if not optimizer.clipnorm:
            clipped |= clip_gradients(optimizer, own, device_of=store.device_of)
            continue
        # Each variable has a norm, whichever servers have parts of it.
        by_shard: dict[int, Gradient] = {}
        for b, gradient in own.items():
            with tf.device(store.device_of(b) or None):
                by_shard |= blocks.split(b, gradient)
        parts = clip_gradients(
            optimizer,
            by_shard,
            lambda shard: blocks.shards[shard].variable,
            lambda shard: store.device_of(blocks.of_shard[shard]),
        )
        for b in own:
            with tf.device(store.device_of(b) or None):
                clipped[b] = blocks.join(b, parts)
    return changes | clipped


def _unweighted(store: ParameterStore, means: BlockUpdates, num_replicas: int) -> BlockUpdates:
    weights = {key: means[key] for key in means if isinstance(key, Weight)}
    changes = {key: mean for key, mean in means.items() if key not in weights}
    for server in store.servers:
        device = store.devices[server]
        with tf.device(device or None):
            factors = {
                key.of_state: tf.math.divide_no_nan(1.0, weights[key]) for key in weights if key.server == server
            }
            if store.updates.loss is Term.SUM:
                factors[False] = tf.constant(float(num_replicas))
            of_state = factors.get(True, factors.get(False) if Weight(server) in weights else None)
            for key, change in changes.items():
                if store.device_of(key) != device:
                    continue
                if _is_mean_of_state(store, key, change):
                    changes[key] = scale(change, of_state)
                elif isinstance(key, int) and store.blocks[key].is_parameter:
                    changes[key] = scale(change, factors.get(False))
    return changes


def _arriving(wire: Wire, weight: tf.Tensor | None) -> tf.Tensor | None:
    """A weight after its way to the servers."""
    return None if weight is None else wire.unpack(wire.pack(weight), weight.dtype)


def _is_mean_of_state(store: ParameterStore, key: Any, change: Any) -> bool:
    """True for changes of state, and of assigned parameters, of which replicas apply the mean."""
    if isinstance(key, Assigned):
        return True
    is_state = isinstance(key, int) and not store.blocks[key].is_parameter
    return is_state and store.blocks[key].aggregation == "mean" and change.dtype.is_floating
