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

from kdist._compat.keras import step_counter
from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.optimizer import clip_gradients
from kdist.model.replica_step import ReplicaOutput, ReplicaStep, batch_size_of
from kdist.parameters.store import Change, ParameterStore, Pulled

#: The next `(batch, seeds)` of a replica.
NextBatch = Callable[[], tuple[Any, tf.Tensor]]

#: What a replica computes between a pull and a push: what it pulled, its next batches, metrics to add them to -> what
#: came out, and of how many examples.
Compute = Callable[[Pulled, NextBatch, list[tf.Tensor]], tuple[ReplicaOutput, "tf.Tensor | int"]]


def one_step(replica_step: ReplicaStep, store: ParameterStore) -> Compute:
    """One step, with the gradient as it is; the learning rate is that of `store`."""

    def compute(
        pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]
    ) -> tuple[ReplicaOutput, tf.Tensor | int]:
        batch, seeds = next_batch()
        counter = step_counter(replica_step.model.optimizer)
        clock = [
            tf.identity(pulled.global_step if variable is counter else store.learning_rate(pulled.global_step))
            for variable in replica_step.clock
        ]
        return replica_step(pulled.trainable, pulled.state, metrics, seeds, batch, clock), batch_size_of(batch)

    return compute


class LocalSteps:
    """Traces the steps of a replica between one pull and one push.

    Args:
        replica_step: the step of the model.
        store: where the learning rate is.
        num_steps: how many batches make a push.
    """

    def __init__(self, replica_step: ReplicaStep, store: ParameterStore, num_steps: int = 1) -> None:
        self._optimizer = replica_step.model.optimizer
        self._row_wise = replica_step.row_wise
        self._compute = one_step(replica_step, store)
        self._store = store
        self._num_steps = num_steps

    def __call__(
        self, pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]
    ) -> tuple[ReplicaOutput, tf.Tensor | int]:
        """Takes the steps, of which each clips its gradients.

        Returns:
            What they make together, with the sums of their gradients; and of how many examples they are.
        """
        output, num_examples = self._one_step(pulled, next_batch, metrics)
        if self._num_steps == 1:
            return output, num_examples
        learning_rate = tf.identity(self._store.learning_rate(pulled.global_step))
        present, sums = pulled, output
        for _ in range(self._num_steps - 1):
            present = replace(
                present,
                trainable=[_moved(*pair, learning_rate) for pair in zip(present.trainable, output.gradients)],
                state=_newer(present.state, output.state),
            )
            output, more_examples = self._one_step(present, next_batch, output.metrics)
            num_examples += more_examples
            gradients = [self._sum(i, pair) for i, pair in enumerate(zip(sums.gradients, output.gradients))]
            sums = ReplicaOutput(gradients, _newer(sums.state, output.state), output.metrics)
        return sums, num_examples

    def _one_step(
        self, start: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]
    ) -> tuple[ReplicaOutput, tf.Tensor | int]:
        output, num_examples = self._compute(start, next_batch, metrics)
        return replace(output, gradients=clip_gradients(self._optimizer, output.gradients)), num_examples

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
    if gradient is None or callable(value):
        return value
    learning_rate = tf.cast(learning_rate, value.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        changes = learning_rate * tf.cast(gradient.values, value.dtype)
        return tf.tensor_scatter_nd_sub(value, gradient.indices[:, None], changes)
    return value - learning_rate * tf.cast(gradient, value.dtype)


def _newer(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [before if after is None else after for before, after in zip(old, new)]
