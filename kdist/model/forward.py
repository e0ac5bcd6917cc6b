"""The one forward pass of kdist, for training, evaluation and histograms; the scope and the metrics of a pure step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import call, compute_loss, global_seed, loss_tracker
from kdist._compat.tensorflow import rename_legacy_functions
from kdist.model.logs import flat
from kdist.model.names import is_seed


class SeededScope(keras.StatelessScope):
    """A stateless scope that gives a state to seed generators outside of layers, as in metrics and losses.

    Their states follow from that of the global generator, if the scope has one: otherwise a step would read, on another
    task, a variable of this process.
    """

    _num_found = 0

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is None and is_seed(variable) and (seed := self.state_mapping.get(id(global_seed()))) is not None:
            self._num_found += 1
            own = tf.constant([self._num_found, 0], seed.dtype)
            value = self.state_mapping[id(variable)] = tf.cast(tf.bitwise.bitwise_xor(seed, own), variable.dtype)
        return value


def forward(model: keras.Model, x: Any, y: Any, sample_weight: Any, *, training: bool) -> tuple[Any, tf.Tensor | None]:
    """Outputs and loss of a batch; no loss is None.

    Runs the model as it is, so the caller enters a `keras.StatelessScope` with the values to use.
    """
    with rename_legacy_functions():
        y_pred = call(model, x, training=training)
        return y_pred, compute_loss(model, x, y, y_pred, sample_weight, training=training)


def update_metrics(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    loss: tf.Tensor | None,
    num_examples: tf.Tensor | int,
) -> dict[str, Any]:
    """Adds a batch to the loss tracker and the compiled metrics; returns what `compute_metrics` returns."""
    if loss is not None:
        loss_tracker(model).update_state(loss, sample_weight=num_examples)
    return flat(model.compute_metrics(x, y, y_pred, sample_weight))


def batch_size_of(batch: Any) -> tf.Tensor | int:
    """The number of examples in a batch: the first dimension of its first tensor, as an int if it is known."""
    first = next(part for part in tf.nest.flatten(batch) if part is not None)
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
