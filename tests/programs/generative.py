"""Programs that learn to make pictures; most feed bare images to a `train_step` of their own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.data import SIZE, batches, gray, pictures
from programs.program import Program
from programs.steps import OwnLoss, follow, update

IMAGE = (SIZE, SIZE, 1)
LATENT = 8


def noise_finder(of_time: layers.Layer) -> keras.Model:
    """From a noisy picture, and when or how noisy it is, to its noise."""
    image, time = layers.Input(IMAGE), layers.Input((1,))
    embedded = layers.Reshape((1, 1, 16))(layers.Dense(16, activation="swish")(layers.Flatten()(of_time(time))))
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(image)
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(layers.Add()([x, embedded]))
    return keras.Model([image, time], layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros")(x))


class DDPM(OwnLoss):
    """Denoising diffusion (Ho et al., 2020): a picture becomes noise in steps, and a network finds what was added."""

    steps = 50

    def __init__(self) -> None:
        super().__init__()
        self.network = noise_finder(layers.Embedding(self.steps, 16))
        self.averaged = noise_finder(layers.Embedding(self.steps, 16))
        self.averaged.set_weights(self.network.get_weights())
        kept = np.cumprod(1 - np.linspace(0.002, 0.2, self.steps))
        self.signal = tf.constant(np.sqrt(kept), tf.float32)
        self.noise = tf.constant(np.sqrt(1 - kept), tf.float32)

    def train_step(self, images: Any) -> dict[str, Any]:
        size = tf.shape(images)[0]
        time = tf.random.uniform((size, 1), 0, self.steps, tf.int32)
        noise = tf.random.normal(tf.shape(images))
        signal, share = (tf.reshape(tf.gather(of, time), (size, 1, 1, 1)) for of in (self.signal, self.noise))
        with tf.GradientTape() as tape:
            found = self.network([signal * images + share * noise, time], training=True)
            loss = self.loss(noise, found)
        update(self.optimizer, tape, loss, self.network)
        follow(self.averaged, self.network)
        return self.show(loss)


def ddpm() -> keras.Model:
    model = DDPM()
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    return model


class DDIM(keras.Model):
    """Implicit diffusion (Song et al., 2021): noise of any amount, and a test of the network that follows slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = layers.Normalization(axis=None)
        self.network = noise_finder(layers.Rescaling(2.0, offset=-1.0))
        self.averaged = keras.models.clone_model(self.network)
        self.noise_loss, self.image_loss = keras.metrics.Mean("noise_loss"), keras.metrics.Mean("image_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.noise_loss, self.image_loss]

    def losses_of(self, images: Any, network: keras.Model, training: bool) -> tuple[Any, Any]:
        images = self.scale(images, training=training)
        noise = keras.random.normal(ops.shape(images))
        angle = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), 0.1, 1.5)
        signal, share = ops.cos(angle), ops.sin(angle)
        noisy = signal * images + share * noise
        found = network([noisy, ops.reshape(share**2, (-1, 1))], training=training)
        return self.loss(noise, found), self.loss(images, (noisy - share * found) / signal)

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.losses_of(images, self.network, training=True)
        update(self.optimizer, tape, noise_loss, self.network)
        follow(self.averaged, self.network)
        self.noise_loss.update_state(noise_loss)
        self.image_loss.update_state(image_loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, images: Any) -> dict[str, Any]:
        noise_loss, image_loss = self.losses_of(images, self.averaged, training=False)
        self.noise_loss.update_state(noise_loss)
        self.image_loss.update_state(image_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def ddim() -> keras.Model:
    model = DDIM()
    model.scale.adapt(pictures(channels=1)[0])
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=1e-4), keras.losses.MeanAbsoluteError())
    return model


def critic(activation: str | None = None) -> keras.Model:
    image = layers.Input(IMAGE)
    x = layers.LeakyReLU(negative_slope=0.2)(layers.Conv2D(8, 4, 2, padding="same")(image))
    x = layers.LeakyReLU(negative_slope=0.2)(layers.Conv2D(16, 4, 2, padding="same")(x))
    return keras.Model(image, layers.Dense(1, activation)(layers.Dropout(0.2)(layers.Flatten()(x))))


def painter() -> keras.Model:
    latent, side = layers.Input((LATENT,)), SIZE // 4
    x = layers.Reshape((side, side, 16))(layers.Dense(side * side * 16, use_bias=False)(latent))
    x = layers.LeakyReLU()(layers.BatchNormalization()(x))
    x = layers.LeakyReLU()(layers.Conv2DTranspose(8, 4, 2, padding="same")(x))
    return keras.Model(latent, layers.Conv2DTranspose(1, 4, 2, padding="same", activation="sigmoid")(x))


class DCGAN(keras.Model):
    """Two networks with an optimizer each (Radford et al., 2016): one paints, one tells paintings from pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.painter, self.critic = painter(), critic()
        self.seeds = keras.random.SeedGenerator(7)

    def compile(self, for_painter: Any, for_critic: Any, loss: Any) -> None:
        super().compile(loss=loss)
        self.for_painter, self.for_critic = for_painter, for_critic
        self.of_painter, self.of_critic = keras.metrics.Mean("painter_loss"), keras.metrics.Mean("critic_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.of_painter, self.of_critic]

    def seen(self, images: Any) -> Any:
        """The features that the critic sees of pictures."""
        return images

    def train_step(self, images: Any) -> dict[str, Any]:
        size = ops.shape(images)[0]
        latent = keras.random.normal((size, LATENT), seed=self.seeds)
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))])
        with tf.GradientTape() as tape:
            both = ops.concatenate([images, self.painter(latent, training=True)])
            answers = self.critic(self.seen(both), training=True)
            critic_loss = self.loss(labels + 0.05 * tf.random.uniform(tf.shape(labels)), answers)
        update(self.for_critic, tape, critic_loss, self.critic)
        with tf.GradientTape() as tape:
            painted = self.critic(self.seen(self.painter(latent, training=True)), training=True)
            painter_loss = self.loss(ops.ones((size, 1)), painted)
        update(self.for_painter, tape, painter_loss, self.painter)
        self.after(answers[:size])
        self.of_critic.update_state(critic_loss)
        self.of_painter.update_state(painter_loss)
        return self.get_metrics_result()

    def after(self, answers: Any) -> None:
        """Is told what the critic said of pictures."""


def adversaries(kind: type[DCGAN]) -> keras.Model:
    model = kind()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(1e-3, beta_1=0.5), loss)
    return model


class ADAGAN(DCGAN):
    """Shows the critic changed pictures, the more often the surer it is (Karras et al., 2020)."""

    wanted, speed = 0.6, 0.05

    def __init__(self) -> None:
        super().__init__()
        self.often = keras.Variable(0.0, trainable=False, name="often")
        self.changes = keras.Sequential([layers.RandomFlip(), layers.RandomTranslation(0.2, 0.2)])

    def seen(self, images: Any) -> Any:
        drawn = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), seed=self.seeds)
        return ops.where(drawn < self.often, self.changes(images, training=True), images)

    def after(self, answers: Any) -> None:
        right = ops.mean(ops.cast(answers > 0, "float32"))
        self.often.assign(ops.clip(self.often + self.speed * ops.sign(right - self.wanted), 0.0, 1.0))


def probability_is_one(model: keras.Model) -> None:
    assert 0 <= float(model.often.numpy()) <= 1


class WGAN(keras.Model):
    """A critic whose gradient has length 1 (Gulrajani et al., 2017), trained three times as often as the painter."""

    def __init__(self) -> None:
        super().__init__()
        self.painter, self.critic = painter(), critic()

    def compile(self, for_painter: Any, for_critic: Any) -> None:
        super().compile()
        self.for_painter, self.for_critic = for_painter, for_critic

    def penalty(self, images: Any, painted: Any) -> Any:
        share = tf.random.uniform((tf.shape(images)[0], 1, 1, 1))
        between = share * images + (1 - share) * painted
        with tf.GradientTape() as tape:
            tape.watch(between)
            answer = self.critic(between, training=True)
        slope = tape.gradient(answer, between)
        return tf.reduce_mean((tf.sqrt(tf.reduce_sum(slope**2, [1, 2, 3]) + 1e-12) - 1.0) ** 2)

    def train_step(self, images: Any) -> dict[str, Any]:
        shape = (tf.shape(images)[0], LATENT)
        for _ in range(3):
            painted = self.painter(tf.random.normal(shape), training=True)
            with tf.GradientTape() as tape:
                distance = tf.reduce_mean(self.critic(painted, training=True) - self.critic(images, training=True))
                critic_loss = distance + 10.0 * self.penalty(images, painted)
            update(self.for_critic, tape, critic_loss, self.critic)
        with tf.GradientTape() as tape:
            answer = self.critic(self.painter(tf.random.normal(shape), training=True), training=True)
            painter_loss = -tf.reduce_mean(answer)
        update(self.for_painter, tape, painter_loss, self.painter)
        return {"critic_loss": critic_loss, "painter_loss": painter_loss}


def wgan() -> keras.Model:
    model = WGAN()
    model.compile(*(keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9) for _ in range(2)))
    return model


def translator() -> keras.Model:
    image = layers.Input(IMAGE)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    x = layers.Add()([x, layers.Conv2D(8, 3, padding="same", activation="relu")(layers.GroupNormalization(4)(x))])
    return keras.Model(image, layers.Conv2D(1, 3, padding="same", activation="sigmoid")(x))


class CycleGAN(keras.Model):
    """Translates between two kinds of pictures and back (Zhu et al., 2017): four networks with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.to_b, self.to_a, self.critic_a, self.critic_b = translator(), translator(), critic(), critic()

    def compile(self, make_optimizer: Any) -> None:
        super().compile()
        self.optimizers = [make_optimizer() for _ in range(4)]

    def train_step(self, pairs: Any) -> dict[str, Any]:
        real_a, real_b = pairs
        with tf.GradientTape(persistent=True) as tape:
            fake_b, fake_a = self.to_b(real_a, training=True), self.to_a(real_b, training=True)
            back = self.far(real_a, self.to_a(fake_b)) + self.far(real_b, self.to_b(fake_a))
            same = self.far(real_a, self.to_a(real_a)) + self.far(real_b, self.to_b(real_b))
            to_b_loss = self.wrong(self.critic_b(fake_b), 1.0) + 10 * back + 5 * same
            to_a_loss = self.wrong(self.critic_a(fake_a), 1.0) + 10 * back + 5 * same
            a_loss = self.wrong(self.critic_a(real_a), 1.0) + self.wrong(self.critic_a(fake_a), 0.0)
            b_loss = self.wrong(self.critic_b(real_b), 1.0) + self.wrong(self.critic_b(fake_b), 0.0)
        networks = (self.to_b, self.to_a, self.critic_a, self.critic_b)
        for optimizer, loss, network in zip(self.optimizers, (to_b_loss, to_a_loss, a_loss, b_loss), networks):
            update(optimizer, tape, loss, network)
        return {"to_b": to_b_loss, "to_a": to_a_loss, "critic_a": a_loss, "critic_b": b_loss, "back": back}

    @staticmethod
    def far(ours: Any, theirs: Any) -> Any:
        return tf.reduce_mean(tf.abs(ours - theirs))

    @staticmethod
    def wrong(answer: Any, wanted: float) -> Any:
        return tf.reduce_mean((answer - wanted) ** 2)


def cycle_gan() -> keras.Model:
    model = CycleGAN()
    model.compile(lambda: keras.optimizers.Adam(2e-3, beta_1=0.5))
    return model


def two_kinds(batch_size: int) -> tf.data.Dataset:
    """Pictures, and negatives of others."""
    images = pictures(channels=1)[0]
    return tf.data.Dataset.zip((batches(images, batch_size), batches(1 - images[::-1], batch_size)))


class Sample(layers.Layer):
    """Draws from normal distributions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, mean: Any, log_variance: Any) -> Any:
        return mean + ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class VAE(keras.Model):
    """A variational autoencoder (Kingma and Welling, 2014), with trackers of its own and no `call`."""

    def __init__(self) -> None:
        super().__init__()
        image, latent = layers.Input(IMAGE), layers.Input((2,))
        x = layers.Dense(32, activation="relu")(layers.Flatten()(image))
        mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
        self.encoder = keras.Model(image, [mean, log_variance, Sample()(mean, log_variance)])
        x = layers.Dense(32, activation="relu")(latent)
        x = layers.Dense(SIZE * SIZE, activation="sigmoid")(x)
        self.decoder = keras.Model(latent, layers.Reshape(IMAGE)(x))
        self.parts = [keras.metrics.Mean(name) for name in ("loss", "reconstruction", "divergence")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.parts

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, log_variance, latent = self.encoder(images)
            entropy = keras.losses.binary_crossentropy(images, self.decoder(latent))
            reconstruction = ops.mean(ops.sum(entropy, (1, 2)))
            divergence = 0.5 * ops.mean(ops.sum(mean**2 + ops.exp(log_variance) - log_variance - 1, 1))
            loss = reconstruction + divergence
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        for metric, value in zip(self.parts, (loss, reconstruction, divergence)):
            metric.update_state(value)
        return {metric.name: metric.result() for metric in self.parts}


def vae() -> keras.Model:
    model = VAE()
    model.compile(keras.optimizers.Adam(0.005))
    return model


class Codebook(layers.Layer):
    """Replaces each vector by the nearest of a book, and lets the gradient pass."""

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.codes = codes

    def build(self, shape: Any) -> None:
        self.book = self.add_weight(shape=(shape[-1], self.codes), initializer="random_uniform", name="book")

    def call(self, x: Any) -> Any:
        flat = ops.reshape(x, (-1, ops.shape(x)[-1]))
        distances = ops.sum(flat**2, 1, keepdims=True) + ops.sum(self.book**2, 0) - 2 * ops.matmul(flat, self.book)
        chosen = ops.one_hot(ops.argmin(distances, 1), self.codes)
        coded = ops.reshape(ops.matmul(chosen, ops.transpose(self.book)), ops.shape(x))
        fixed = ops.stop_gradient
        self.add_loss(0.25 * ops.mean((fixed(coded) - x) ** 2) + ops.mean((coded - fixed(x)) ** 2))
        return x + fixed(coded - x)


class VQVAE(keras.Model):
    """An autoencoder with a book of codes in its middle (van den Oord et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        encoder = [layers.Conv2D(8, 3, 2, padding="same", activation="relu"), layers.Conv2D(4, 1)]
        decoder = [
            layers.Conv2DTranspose(8, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(1, 3, padding="same"),
        ]
        self.network = keras.Sequential([layers.Input(IMAGE), *encoder, Codebook(16), *decoder])
        self.parts = [keras.metrics.Mean(name) for name in ("loss", "reconstruction", "code")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.parts

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            reconstruction = ops.mean((images - self.network(images)) ** 2) / 0.1
            code = ops.sum(self.network.losses)
            loss = reconstruction + code
        update(self.optimizer, tape, loss, self.network)
        for metric, value in zip(self.parts, (loss, reconstruction, code)):
            metric.update_state(value)
        return {metric.name: metric.result() for metric in self.parts}


def vq_vae() -> keras.Model:
    model = VQVAE()
    model.compile(keras.optimizers.Adam(0.01))
    return model


def autoencoder() -> keras.Model:
    image = layers.Input(IMAGE)
    x = layers.MaxPooling2D(2, padding="same")(layers.Conv2D(8, 3, activation="relu", padding="same")(image))
    x = layers.Conv2DTranspose(8, 3, 2, activation="relu", padding="same")(x)
    model = keras.Model(image, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
    model.compile("adam", "binary_crossentropy")
    return model


def noisy_and_clean(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    images = pictures(channels=1)[0]
    noise = np.random.default_rng(4).normal(0, 0.3, images.shape)
    return np.clip(images + noise, 0, 1).astype(np.float32), images


PROGRAMS = [
    Program("DDPM", ddpm, gray, draws=True, near=0.6),
    Program("DDIM", ddim, gray, draws=True, shows="noise_loss", near=0.6, validates=True),
    Program("DCGAN", lambda: adversaries(DCGAN), gray, draws=True, shows="critic_loss", near=None),
    Program(
        "GAN with adaptive augmentation (ADA)",
        lambda: adversaries(ADAGAN),
        gray,
        draws=True,
        shows="critic_loss",
        near=None,
        check=probability_is_one,
    ),
    Program("WGAN-GP", wgan, gray, draws=True, shows="critic_loss", near=None, of_batches=True),
    Program("CycleGAN", cycle_gan, two_kinds, shows="back", of_batches=True),
    Program("variational autoencoder", vae, gray, draws=True),
    Program("VQ-VAE", vq_vae, gray, shows="reconstruction"),
    Program("denoising autoencoder", autoencoder, noisy_and_clean),
]
