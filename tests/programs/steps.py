"""Parts that the training steps of several programs share."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def update(optimizer: Any, tape: tf.GradientTape, loss: Any, network: keras.Model) -> None:
    """One step of a network along the gradient of a loss."""
    weights = network.trainable_weights
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def follow(slow: keras.Model, fast: keras.Model, kept: float = 0.9) -> None:
    """Moves the weights of one network towards those of another."""
    for old, new in zip(slow.weights, fast.weights):
        old.assign(kept * old + (1 - kept) * new)


class OwnLoss(keras.Model):
    """A model whose step computes the loss, and shows its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = keras.metrics.Mean("loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.shown]

    def show(self, loss: Any) -> dict[str, Any]:
        self.shown.update_state(loss)
        return {"loss": self.shown.result()}
