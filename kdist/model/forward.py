"""The one forward pass of kdist, for training, evaluation and histograms, and what Keras counts of it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kdist._compat.keras import call, compute_loss, track_loss
from kdist._compat.tensorflow import rename_legacy_functions
from kdist.model.logs import flat


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
        track_loss(model, loss, num_examples)
    return flat(model.compute_metrics(x, y, y_pred, sample_weight))


def batch_size_of(batch: Any) -> tf.Tensor | int:
    """The number of examples in a batch: the first dimension of its first tensor, as an int if it is known."""
    first = next(part for part in tf.nest.flatten(batch) if part is not None)
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]
