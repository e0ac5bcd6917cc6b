"""What a replica does between a pull and a push: one step, or several on a copy of its own.

After DistBelief's Downpour SGD (Dean et al., 2012) with n_fetch = n_push: a worker continues by plain gradient descent,
adds up its gradients, and pushes their sum. With more than one step this is a different algorithm than asynchronous
training, with fewer bytes and more staleness; for plain SGD with a single worker it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.replica_step import ReplicaStep
from kdist.model.train_step import ClockKind
from kdist.model.updates import ReplicaOutput, RunningStep
from kdist.parameters.placement.messages import Change, Pulled
from kdist.parameters.store import ParameterStore

#: The next `(batch, seeds)` of a replica.
NextBatch = Callable[[], tuple[Any, tf.Tensor]]

#: What a replica computes between a pull and a push: what it pulled, its next batches, metrics to add them to -> a step
#: in phases, most often one.
Compute = Callable[[Pulled, NextBatch, list[tf.Tensor]], RunningStep]


def one_step(replica_step: ReplicaStep, store: ParameterStore) -> Compute:
    """One step, with the gradient as it is; the learning rate is that of `store`."""

    def compute(pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        batch, seeds = next_batch()
        clock = []
        for read in replica_step.clock:
            iteration = replica_step.updates.groups[read.group].iteration(pulled.global_step)
            if read.kind is ClockKind.LOSS_SCALE:
                value = store.loss_scale()
            else:
                value = iteration if read.kind is ClockKind.STEP else store.learning_rate(iteration, read.group)
            clock.append(tf.identity(value))
        moment = None
        if replica_step.worker_state.variables:
            moment = tf.identity(pulled.global_step), tf.identity(store.state_resets())
        return replica_step.run(pulled.trainable, pulled.state, metrics, seeds, batch, clock, moment, pulled.rows)

    return compute


class LocalSteps:
    """Traces the steps of a replica between one pull and one push.

    Args:
        replica_step: the step of the model.
        store: where the learning rate is.
        num_steps: how many batches make a push.
    """

    def __init__(self, replica_step: ReplicaStep, store: ParameterStore, num_steps: int = 1) -> None:
        self._updates = replica_step.updates
        self._row_wise = replica_step.row_wise
        self._compute = one_step(replica_step, store)
        self._store = store
        self._num_steps = num_steps

    def __call__(self, pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        """Takes the steps, of which each clips its gradients; several make one, with the sums of their gradients."""
        if self._num_steps > 1:
            yield self._together(pulled, next_batch, metrics)
            return
        running = self._compute(pulled, next_batch, metrics)
        fresh: Any = None
        for _ in range(self._updates.num_phases):
            fresh = yield self._clipped(running.send(fresh))

    def _together(self, pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> ReplicaOutput:
        sums = output = self._clipped(next(self._compute(pulled, next_batch, metrics)))
        learning_rate = tf.identity(self._store.learning_rate(pulled.global_step))
        present = pulled
        for _ in range(self._num_steps - 1):
            present = replace(
                present,
                trainable=[_moved(*pair, learning_rate) for pair in zip(present.trainable, output.gradients)],
                state=_newer(present.state, output.state),
            )
            output = self._clipped(next(self._compute(present, next_batch, output.metrics)))
            gradients = [self._sum(i, pair) for i, pair in enumerate(zip(sums.gradients, output.gradients))]
            num_examples = sums.num_examples + output.num_examples
            state = _newer(sums.state, output.state)
            overflow = None if output.overflow is None else tf.maximum(sums.overflow, output.overflow)
            sums = replace(output, gradients=gradients, state=state, num_examples=num_examples, overflow=overflow)
        return sums

    def _clipped(self, output: ReplicaOutput) -> ReplicaOutput:
        return replace(output, gradients=self._updates.clip(output.gradients, output.phase))

    def _sum(self, index: int, gradients: tuple[Change, Change]) -> Change:
        one, other = gradients
        if one is None or other is None:
            return other if one is None else one
        if isinstance(one, tf.Tensor):
            return one + other
        both = tf.IndexedSlices(tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0))
        return sum_duplicates(both) if index in self._row_wise else both


def _moved(value: Any, gradient: Change, learning_rate: tf.Tensor) -> Any:
    """A value after one step of gradient descent; a table whose rows are fetched is read anew in every step."""
    if gradient is None or value is None:
        return value
    learning_rate = tf.cast(learning_rate, value.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        changes = learning_rate * tf.cast(gradient.values, value.dtype)
        return tf.tensor_scatter_nd_sub(value, gradient.indices[:, None], changes)
    return value - learning_rate * tf.cast(gradient, value.dtype)


def _newer(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [before if after is None else after for before, after in zip(old, new)]
