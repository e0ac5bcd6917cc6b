"""Variables that are no weights of the model: of TensorFlow in a layer or a step, of Keras in a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, toy_data

import kdist

X, Y = toy_data(64)


class Counts(keras.layers.Layer):
    """Scales by one `tf.Variable`, and counts its calls in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.calls = tf.Variable(2.0, name="scale"), tf.Variable(0.0, name="calls")

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        return inputs * self.scale + 0.01 * self.calls


class Anneals(keras.Sequential):
    """A step that reads and assigns a `tf.Variable`."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x)) * self.layers[0].scale
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.layers[0].scale.assign(0.9 * self.layers[0].scale)
        return {"loss": loss}


def build(kind: type[keras.Sequential] = keras.Sequential, loss: Any = "mse") -> keras.Model:
    keras.utils.set_random_seed(1)
    model = kind([keras.layers.Input((6,)), Counts(), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize("kind", in_short([keras.Sequential, Anneals], [Anneals]))
@pytest.mark.parametrize(
    "cluster", [pytest.param("local", marks=pytest.mark.long), pytest.param("1ps1w", marks=pytest.mark.cluster)]
)
@pytest.mark.usefixtures("tasks_prepared")
def test_they_are_read_and_assigned_as_in_keras(kind: type[keras.Sequential], cluster: str, run_dir: Path) -> None:
    plain, trainer = build(kind), kdist.Trainer(lambda: build(kind), cluster, run_dir=run_dir)
    for fit in (plain.fit, trainer.fit):
        fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert trainer.model.layers[0].calls.numpy() == plain.layers[0].calls.numpy() > 0
    assert trainer.model.layers[0].scale.numpy() == pytest.approx(plain.layers[0].scale.numpy())


@pytest.mark.parametrize("kind", [keras.Sequential, Anneals])
def test_several_synchronous_replicas_do_not_assign_them(kind: type[keras.Sequential], run_dir: Path) -> None:
    trainer = kdist.Trainer(lambda: build(kind), "1ps2w", "sync_replicas", run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=r"strategy=sync_replicas: .* assigns calls:0.*self\.add_weight"):
        trainer.fit(X, Y, batch_size=8, verbose=0)


class Loss(keras.losses.Loss):
    """Draws noise, and may count its calls."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.seed, self.counts = keras.random.SeedGenerator(1), counts
        self.calls = keras.Variable(0.0, name="calls", trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if self.counts:
            self.calls.assign_add(1.0)
        noise = keras.random.uniform(keras.ops.shape(y_pred), seed=self.seed)
        return keras.ops.mean(keras.ops.square(y_pred) * 0 + noise, -1)


def test_a_loss_draws_other_numbers_in_every_step(run_dir: Path) -> None:
    trainer = kdist.Trainer(lambda: build(loss=Loss(counts=False)), run_dir=run_dir)
    losses = trainer.fit(X, Y, batch_size=16, steps_per_epoch=1, epochs=4, verbose=0).history["loss"]
    assert len(set(losses)) == len(losses)


def test_one_of_keras_that_a_loss_assigns_is_refused(run_dir: Path) -> None:
    trainer = kdist.Trainer(lambda: build(loss=Loss(counts=True)), run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=r"a step assigns calls, which the model does not have"):
        trainer.fit(X, Y, batch_size=16, verbose=0)
