"""Programs in the form of those on keras.io, on data of their shapes; only a function that builds the model is new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import kdist

CLUSTERS: dict[str, dict[str, Any]] = {
    "async": {"cluster": "2ps2w"},
    "sync": {"cluster": "2ps2w", "strategy": "sync_replicas"},
    "all-reduce": {"cluster": "2w"},
}


class Sampling(layers.Layer):
    """Draws from the distribution that the encoder describes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        noise = keras.random.normal(shape=ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    """A variational autoencoder with trackers of its own, and without `call`."""

    def __init__(self, encoder: keras.Model, decoder: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)))
            kl_loss = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def vae() -> keras.Model:
    images = keras.Input((28, 28, 1))
    x = layers.Conv2D(8, 3, activation="relu", strides=2, padding="same")(images)
    x = layers.Conv2D(16, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
    mean, log_variance = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
    encoder = keras.Model(images, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder")
    z = keras.Input((2,))
    x = layers.Reshape((7, 7, 16))(layers.Dense(7 * 7 * 16, activation="relu")(z))
    x = layers.Conv2DTranspose(16, 3, activation="relu", strides=2, padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, activation="relu", strides=2, padding="same")(x)
    decoder = keras.Model(z, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x), name="decoder")
    model = VAE(encoder, decoder)
    model.compile(optimizer=keras.optimizers.Adam(0.003))
    return model


def digits(number: int) -> np.ndarray:
    """Bars at two places: `[number, 28, 28, 1]` of 0 and 1."""
    images = np.zeros((number, 28, 28, 1), np.float32)
    for image, place in zip(images, np.random.default_rng(0).integers(2, 20, number)):
        image[place : place + 6, 4:24] = 1
    return images


class SimSiam(keras.Model):
    """Self-supervised: two views of an image have similar representations; gradients stop on one side."""

    def __init__(self, encoder: keras.Model, predictor: keras.Model) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder, predictor
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        ds_one, ds_two = data
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(ds_one), self.encoder(ds_two)
            p1, p2 = self.predictor(z1), self.predictor(z2)
            loss = _dissimilarity(p1, z2) / 2 + _dissimilarity(p2, z1) / 2
        learnable = self.encoder.trainable_variables + self.predictor.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, learnable), learnable))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def _dissimilarity(p: Any, z: Any) -> Any:
    z = ops.normalize(ops.stop_gradient(z), axis=1)
    return -ops.mean(ops.sum(ops.normalize(p, axis=1) * z, axis=1))


def sim_siam() -> keras.Model:
    def block(x: Any, units: int) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(layers.Dense(units, use_bias=False)(x)))

    images = keras.Input((28, 28, 1))
    encoder = keras.Model(images, layers.Dense(16)(block(layers.Flatten()(images), 32)))
    z = keras.Input((16,))
    model = SimSiam(encoder, keras.Model(z, layers.Dense(16)(block(z, 8))))
    model.compile(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.03, 200), momentum=0.6))
    return model


def two_views(number: int) -> tf.data.Dataset:
    images = digits(number)
    rng = np.random.default_rng(1)
    views = [images + rng.normal(0, 0.1, images.shape).astype(np.float32) for _ in range(2)]
    return tf.data.Dataset.from_tensor_slices(tuple(views)).batch(32)


PROGRAMS: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], set[str], float]] = {
    # The last is what the loss has to come down to, as a part of what it was.
    "vae": (vae, lambda: digits(512), {"loss", "reconstruction_loss", "kl_loss"}, 0.75),
    "simsiam": (sim_siam, lambda: two_views(512), {"loss"}, 1.2),
}


@pytest.mark.cluster
@pytest.mark.parametrize(
    "where", [where if where == "async" else pytest.param(where, marks=pytest.mark.long) for where in CLUSTERS]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_keras_io_trains(name: str, where: str, run_dir: Path) -> None:
    build, data, names, part = PROGRAMS[name]
    keras.utils.set_random_seed(1)
    trainer = kdist.Trainer(build, run_dir=run_dir, **CLUSTERS[where])
    history = trainer.fit(data(), batch_size=32, epochs=6, verbose=0)
    assert set(history.history) == names
    first, *_, last = history.history["loss"]
    if first > 0:
        assert last < part * first
    else:
        assert last < part * first < 0
