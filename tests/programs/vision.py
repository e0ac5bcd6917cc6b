"""Programs that look at pictures."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.data import SIZE, batches, pictures
from programs.program import EXAMPLES, Program
from programs.steps import update

IMAGE = (SIZE, SIZE, 3)


def compiled(model: keras.Model, rate: float = 0.01) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def augmented() -> keras.Model:
    image = layers.Input(IMAGE)
    x = image
    for change in (layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.1), layers.RandomRotation(0.02)):
        x = change(x)
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, 2, activation="relu")(x))
    x = layers.SeparableConv2D(16, 3, activation="relu")(x)
    return compiled(keras.Model(image, layers.Dense(4)(layers.Dropout(0.2)(layers.Flatten()(x)))))


class Patches(layers.Layer):
    """Cuts a picture into a sequence of small ones, and adds where each was."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size, self.width = size, width
        self.project, self.of_places = layers.Dense(width), layers.Embedding((SIZE // size) ** 2, width)

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, self.size)
        patches = ops.reshape(patches, (-1, (SIZE // self.size) ** 2, 3 * self.size**2))
        return self.project(patches) + self.of_places(ops.arange((SIZE // self.size) ** 2))


def vision_transformer() -> keras.Model:
    """Patches as words (Dosovitskiy et al., 2021); weights decay, and the pictures are scaled by an adapted layer."""
    scale = layers.Normalization()
    scale.adapt(pictures()[0])
    image = layers.Input(IMAGE)
    x = Patches(4, 16)(scale(image))
    for _ in range(2):
        normed = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(normed, normed)])
        x = layers.Add()([x, layers.Dense(16)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))])
    model = keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    top = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.005, weight_decay=1e-4), loss, metrics=["accuracy", top])
    return model


def u_net() -> keras.Model:
    """A class for each pixel (Ronneberger et al., 2015)."""
    image = layers.Input(IMAGE)
    kept, x = [], image
    for width in (8, 16):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        kept.append(x)
        x = layers.MaxPooling2D()(x)
    for width in (16, 8):
        x = layers.Conv2DTranspose(width, 3, 2, padding="same", activation="relu")(x)
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(layers.Concatenate()([x, kept.pop()]))
    model = keras.Model(image, layers.Conv2D(2, 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    union = keras.metrics.MeanIoU(2, sparse_y_pred=False)
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy", union])
    return model


def outlined(batch_size: int) -> tf.data.Dataset:
    images = pictures()[0]
    return batches((images, (images.mean(-1, keepdims=True) > 0.6).astype(np.int32)), batch_size)


class Sharper(keras.metrics.Mean):
    """The signal-to-noise ratio of pictures, in decibels."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().update_state(tf.image.psnr(y_true, y_pred, max_val=1.0), sample_weight)


def super_resolution() -> keras.Model:
    """Pixels that are arranged from channels (Shi et al., 2016)."""
    image = layers.Input((SIZE // 2, SIZE // 2, 1))
    x = layers.Conv2D(8, 5, padding="same", activation="relu", kernel_initializer="orthogonal")(image)
    x = layers.Conv2D(4, 3, padding="same", kernel_initializer="orthogonal")(x)
    model = keras.Model(image, layers.Lambda(lambda channels: tf.nn.depth_to_space(channels, 2))(x))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[Sharper(name="psnr")])
    return model


def small_and_large(batch_size: int) -> tf.data.Dataset:
    large = batches(pictures(channels=1)[0], batch_size)
    return large.map(lambda image: (tf.image.resize(image, (SIZE // 2, SIZE // 2), method="area"), image))


class ZeroDCE(keras.Model):
    """Brightens dark pictures by curves, with nothing to compare with (Guo et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        image = layers.Input(IMAGE)
        first = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
        second = layers.Conv2D(8, 3, padding="same", activation="relu")(first)
        curves = layers.Conv2D(12, 3, padding="same", activation="tanh")(layers.Concatenate()([first, second]))
        self.curves = keras.Model(image, curves)

    def compile(self, rate: float) -> None:
        super().compile()
        self.optimizer = keras.optimizers.Adam(rate)
        self.seen = [keras.metrics.Mean(name) for name in ("loss", "smooth", "exposed", "colors")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.seen

    def call(self, images: Any) -> Any:
        for curve in tf.split(self.curves(images), 4, axis=-1):
            images += curve * (images**2 - images)
        return images

    def losses_of(self, images: Any) -> tuple[Any, Any, Any, Any]:
        curves, bright = self.curves(images), self(images)
        across, down = curves[:, 1:] - curves[:, :-1], curves[:, :, 1:] - curves[:, :, :-1]
        smooth = 20 * (tf.reduce_mean(across**2) + tf.reduce_mean(down**2))
        exposed = 10 * tf.reduce_mean((tf.nn.avg_pool2d(bright, 4, 4, "VALID") - 0.6) ** 2)
        red, green, blue = tf.unstack(tf.reduce_mean(bright, (1, 2)), axis=-1)
        colors = 5 * tf.reduce_mean(tf.sqrt((red - green) ** 4 + (green - blue) ** 4 + (blue - red) ** 4 + 1e-12))
        return smooth + exposed + colors, smooth, exposed, colors

    def train_step(self, images: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            losses = self.losses_of(images)
        update(self.optimizer, tape, losses[0], self.curves)
        return self.shown(losses)

    def test_step(self, images: Any) -> dict[str, Any]:
        return self.shown(self.losses_of(images))

    def shown(self, losses: Any) -> dict[str, Any]:
        for metric, loss in zip(self.seen, losses):
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.seen}


def zero_dce() -> keras.Model:
    model = ZeroDCE()
    model.compile(0.005)
    return model


def on_top() -> keras.Model:
    """A network that was trained for something else, frozen, below a new layer."""
    base = keras.Sequential(
        [layers.Input(IMAGE), layers.Conv2D(8, 3, 2), layers.BatchNormalization(), layers.ReLU()], name="base"
    )
    whole = keras.Sequential([base, layers.Flatten(), layers.Dense(2)])
    images, labels = pictures()
    compiled(whole).fit(images, labels // 2, epochs=1, shuffle=False, verbose=0)
    base.trainable = False
    image = layers.Input(IMAGE)
    return compiled(keras.Model(image, layers.Dense(4)(layers.Flatten()(base(image, training=False)))), rate=0.001)


def thawed(model: keras.Model) -> None:
    model.get_layer("base").trainable = True
    compiled(model, rate=0.0005)


class Endpoint(layers.Layer):
    """Adds the loss of a text, and hands the predictions on."""

    def call(self, texts: Any, predicted: Any) -> Any:
        length, size = ops.shape(predicted)[1], ops.shape(texts)[0]
        loss = tf.nn.ctc_loss(
            labels=tf.cast(texts, tf.int32),
            logits=predicted,
            label_length=tf.fill((size,), ops.shape(texts)[1]),
            logit_length=tf.fill((size,), length),
            logits_time_major=False,
            blank_index=-1,
        )
        self.add_loss(tf.reduce_mean(loss))
        return predicted


def captcha() -> keras.Model:
    """Reads four characters; the labels are an input, and nothing is compiled but an optimizer."""
    image, text = layers.Input((16, 8, 1), name="image"), layers.Input((4,), name="text", dtype="int32")
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(layers.Reshape((16, 64))(x))
    model = keras.Model([image, text], Endpoint()(text, layers.Dense(6)(x)))
    model.compile(keras.optimizers.Adam(0.02))
    return model


def stripes(batch_size: int) -> tf.data.Dataset:
    rng = np.random.default_rng(21)
    texts = rng.integers(0, 5, (EXAMPLES, 4))
    images = rng.uniform(0, 0.1, (EXAMPLES, 16, 8, 1)).astype(np.float32)
    for image, text in zip(images, texts):
        for place, character in enumerate(text):
            image[4 * place + 1 : 4 * place + 3, character : character + 2] = 1
    return batches({"image": images, "text": texts.astype(np.int32)}, batch_size)


def next_frame() -> keras.Model:
    frames = layers.Input((4, 8, 8, 1))
    x = layers.BatchNormalization()(layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True)(frames))
    model = keras.Model(frames, layers.Conv3D(1, 3, padding="same", activation="sigmoid")(x))
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy")
    return model


def moving(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A bright square that moves to the right; the target is a frame later."""
    rng = np.random.default_rng(22)
    films = np.zeros((EXAMPLES, 5, 8, 8, 1), np.float32)
    for film, row, column in zip(films, rng.integers(0, 7, EXAMPLES), rng.integers(0, 3, EXAMPLES)):
        for time, frame in enumerate(film):
            frame[row : row + 2, column + time : column + time + 2] = 1
    return films[:, :-1], films[:, 1:]


PROGRAMS = [
    Program("classification with augmentation", augmented, lambda size: pictures(), draws=True, validates=True),
    Program("vision transformer", vision_transformer, lambda size: pictures(), validates=True),
    Program("segmentation with a U-Net", u_net, outlined),
    Program("super-resolution", super_resolution, small_and_large),
    Program("Zero-DCE", zero_dce, lambda size: batches(pictures()[0] * 0.4, size), validates=True),
    Program("a frozen network, then fine-tuned", on_top, lambda size: pictures(), then=thawed, epochs=2),
    Program("captchas, with the loss as a layer", captcha, stripes),
    Program("next frame of a film", next_frame, moving),
]
