"""Programs in the form of those on keras.io, on data of their shapes; only a function that builds the model is new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_io_programs as more
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


class DCGAN(keras.Model):
    """A generator and a discriminator of images, each with an optimizer of its own."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model, latent_dim: int) -> None:
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images: Any) -> dict[str, Any]:
        batch_size = ops.shape(real_images)[0]
        latent = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        images = ops.concatenate([self.generator(latent), real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        latent = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), self.discriminator(self.generator(latent)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def image_networks(latent_dim: int, activation: str | None) -> tuple[keras.Model, keras.Model]:
    """A discriminator and a generator of images of 28 x 28."""
    discriminator = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(16, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1, activation=activation),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input((latent_dim,)),
            layers.Dense(7 * 7 * 16),
            layers.Reshape((7, 7, 16)),
            layers.Conv2DTranspose(16, 4, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )
    return discriminator, generator


def dcgan() -> keras.Model:
    model = DCGAN(*image_networks(16, "sigmoid"), latent_dim=16)
    model.compile(
        d_optimizer=keras.optimizers.Adam(1e-3),
        g_optimizer=keras.optimizers.Adam(1e-3),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
    return model


class WGAN(keras.Model):
    """A Wasserstein GAN with gradient penalty: several steps of the critic for each of the generator."""

    def __init__(
        self,
        discriminator: keras.Model,
        generator: keras.Model,
        latent_dim: int,
        discriminator_extra_steps: int = 3,
        gp_weight: float = 10.0,
    ) -> None:
        super().__init__()
        self.discriminator, self.generator, self.latent_dim = discriminator, generator, latent_dim
        self.d_steps, self.gp_weight = discriminator_extra_steps, gp_weight

    def compile(self, d_optimizer: Any, g_optimizer: Any, d_loss_fn: Any, g_loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, batch_size: Any, real_images: Any, fake_images: Any) -> Any:
        alpha = tf.random.uniform([batch_size, 1, 1, 1], 0.0, 1.0)
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images: Any) -> dict[str, Any]:
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            latent = tf.random.normal(shape=(batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                fake_images = self.generator(latent, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(batch_size, real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))
        latent = tf.random.normal(shape=(batch_size, self.latent_dim))
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.discriminator(self.generator(latent, training=True), training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan_gp() -> keras.Model:
    model = WGAN(*image_networks(16, None), latent_dim=16)
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.0002, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(0.0002, beta_1=0.5, beta_2=0.9),
        d_loss_fn=lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
        g_loss_fn=lambda fake_img: -tf.reduce_mean(fake_img),
    )
    return model


PROGRAMS: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], set[str], float | None]] = {
    # The last is what the loss has to come down to, as a part of what it was; of a GAN nobody knows.
    "vae": (vae, lambda: digits(512), {"loss", "reconstruction_loss", "kl_loss"}, 0.75),
    "simsiam": (sim_siam, lambda: two_views(512), {"loss"}, 1.2),
    "dcgan": (dcgan, lambda: digits(512), {"d_loss", "g_loss"}, None),
    "wgan_gp": (wgan_gp, lambda: digits(512), {"d_loss", "g_loss"}, None),
    "siamese": (more.siamese, more.triplets, {"loss"}, 0.7),
    "vision_transformer": (more.vision_transformer, more.pictures, {"loss", "accuracy", "top-2-accuracy"}, 0.9),
    "efficientnet": (more.efficientnet, more.pictures, {"loss", "accuracy"}, 0.9),
    "language_model": (more.language_model, more.texts, {"loss"}, 0.7),
    "forecast": (more.forecast, more.weather, {"loss"}, 0.5),
    "distiller": (more.distiller, more.pictures, {"loss", "sparse_categorical_accuracy"}, 0.7),
    "captcha_reader": (more.captcha_reader, more.captchas, {"loss"}, 0.9),
}


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) for name in PROGRAMS for where in CLUSTERS],
)
def test_a_program_of_keras_io_trains(name: str, where: str, run_dir: Path) -> None:
    build, data, names, part = PROGRAMS[name]
    keras.utils.set_random_seed(1)
    trainer = kdist.Trainer(build, run_dir=run_dir, **CLUSTERS[where])
    given = data()
    x, y = given if isinstance(given, tuple) else (given, None)
    history = trainer.fit(x, y, batch_size=32, epochs=6, verbose=0)
    assert set(history.history) == names
    if part is None:
        assert all(np.isfinite(values).all() for values in history.history.values())
        return
    first, *_, last = history.history["loss"]
    if first > 0:
        assert last < part * first
    else:
        assert last < part * first < 0


anywhere = pytest.mark.parametrize("where", CLUSTERS)


@anywhere
@pytest.mark.long
@pytest.mark.cluster
def test_features_are_prepared_in_the_data_set_of_each_worker(where: str, run_dir: Path) -> None:
    features = more.feature_space()
    data = more.adapted(features)
    model = more.diagnosis(features.get_encoded_features())
    trainer = kdist.Trainer(model, run_dir=run_dir, **CLUSTERS[where])
    losses = trainer.fit(data, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]


@anywhere
@pytest.mark.long
@pytest.mark.cluster
def test_a_model_is_trained_on_top_of_a_frozen_one_and_then_whole(where: str, run_dir: Path) -> None:
    trainer = kdist.Trainer(more.mobilenet, run_dir=run_dir / "top", **CLUSTERS[where])
    losses = trainer.fit(*more.halves(), batch_size=32, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    model = trainer.model
    frozen = model.get_layer(index=3)
    before = [weight.numpy() for weight in frozen.weights]
    tuned = kdist.Trainer(more.unfrozen(model), run_dir=run_dir / "whole", **CLUSTERS[where])
    tuned.fit(*more.halves(), batch_size=32, epochs=1, verbose=0)
    after = tuned.model.get_layer(index=3).weights
    assert all(np.any(old != new.numpy()) for old, new in zip(before, after) if new.trainable)
