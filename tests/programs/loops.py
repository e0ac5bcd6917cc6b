"""Programs about training itself: losses, metrics, precision and steps of one's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from programs.data import batches, pictures
from programs.program import EXAMPLES, Program
from programs.steps import OwnLoss


def forecast() -> keras.Model:
    series = layers.Input((20, 3))
    model = keras.Model(series, layers.Dense(1)(layers.LSTM(16)(series)))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def windows(batch_size: int) -> tf.data.Dataset:
    series = np.sin(np.arange(EXAMPLES + 39)[:, None] / np.arange(3, 6)).astype(np.float32)
    return keras.utils.timeseries_dataset_from_array(series[:-20], series[20:, 1:2], 20, batch_size=batch_size)


def points() -> tuple[np.ndarray, np.ndarray]:
    """Separable points `(examples, 6)`, and which of three features is the largest."""
    x = np.random.default_rng(31).normal(size=(EXAMPLES, 6)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def half_precision() -> keras.Model:
    """Most of the arithmetic in float16, with a loss that is scaled."""
    options: dict[str, Any] = {"dtype": "mixed_float16"}
    image = layers.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, 2, activation="relu", **options)(image)
    x = layers.Dense(16, activation="relu", **options)(layers.Flatten(**options)(x))
    model = keras.Model(image, layers.Dense(4, activation="softmax", dtype="float32")(x))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.005))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def accumulated() -> keras.Model:
    """Applies the mean gradient of four batches; its weights follow in a moving average."""
    model = keras.Sequential([layers.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


class Balanced(keras.metrics.Metric):
    """The mean over classes of how often each is found."""

    def __init__(self, classes: int, **options: Any) -> None:
        super().__init__(**options)
        self.found, self.all = (
            self.add_weight(shape=(classes,), initializer="zeros", name=name) for name in ("found", "all")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        y_true = ops.cast(ops.reshape(y_true, (-1,)), "int32")
        which = ops.one_hot(y_true, ops.shape(self.all)[0])
        right = ops.cast(ops.cast(ops.argmax(y_pred, -1), "int32") == y_true, "float32")
        self.all.assign(self.all + ops.sum(which, 0))
        self.found.assign(self.found + ops.sum(which * right[:, None], 0))

    def result(self) -> Any:
        return ops.mean(self.found / ops.maximum(self.all, 1))


class OwnStep(keras.Sequential):
    """Writes the step out, with a metric of its own and those that `compile` got."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.norms = keras.metrics.Mean("norm")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted, weights)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.norms.update_state(norm)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return self.compute_metrics(x, y, predicted, weights)


def own_step() -> keras.Model:
    model = OwnStep([layers.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.5), loss, metrics=[Balanced(3, name="balanced")], weighted_metrics=["accuracy"]
    )
    return model


def weighted(batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = points()
    return x, y, np.where(y == 0, 2.0, 0.5).astype(np.float32)


def two_tasks() -> keras.Model:
    """Two inputs and two outputs, by name, each with its loss, weight and metrics."""
    numbers, kind = layers.Input((6,), name="numbers"), layers.Input((1,), name="kind", dtype="int32")
    x = layers.Concatenate()([numbers, layers.Flatten()(layers.Embedding(4, 2)(kind))])
    x = layers.Dense(16, activation="relu", kernel_regularizer="l2")(x)
    model = keras.Model([numbers, kind], {"which": layers.Dense(3)(x), "how_much": layers.Dense(1)(x)})
    losses = {"which": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "how_much": "mse"}
    metrics = {"which": ["accuracy"], "how_much": ["mae"]}
    model.compile(keras.optimizers.Adam(0.02), losses, loss_weights={"which": 1.0, "how_much": 0.2}, metrics=metrics)
    return model


def two_targets(batch_size: int) -> tuple[Any, Any]:
    x, y = points()
    kinds = (np.arange(EXAMPLES) % 4).astype(np.int32)[:, None]
    return {"numbers": x, "kind": kinds}, {"which": y, "how_much": x[:, :1] + kinds}


class Physics(OwnLoss):
    """Solves y' = -y, y(0) = 1: the loss has the derivative of the network (Raissi et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Input((1,)), layers.Dense(16, "tanh"), layers.Dense(1)])

    def call(self, time: Any) -> Any:
        return self.net(time)

    def train_step(self, data: Any) -> dict[str, Any]:
        (time,) = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(time)
                y = self(time)
            slope = inner.gradient(y, time)
            loss = tf.reduce_mean((slope + y) ** 2) + tf.reduce_mean((self(0.0 * time) - 1.0) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        return self.show(loss)


def physics() -> keras.Model:
    model = Physics()
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 20, 0.9)))
    return model


def times(batch_size: int) -> tf.data.Dataset:
    """Tuples of one."""
    return batches((np.random.default_rng(32).uniform(0, 2, (EXAMPLES, 1)).astype(np.float32),), batch_size)


class SharpnessAware(OwnLoss):
    """Takes the gradient a little way uphill, and goes back before the step (Foret et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Input((6,)), layers.Dense(16, "relu"), layers.Dense(3)])

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        moves = [gradient * 0.05 / (norm + 1e-12) for gradient in gradients]
        for weight, move in zip(weights, moves):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            uphill = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(uphill, weights)
        for weight, move in zip(weights, moves):
            weight.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, weights))
        return self.show(loss)


def sharpness_aware() -> keras.Model:
    model = SharpnessAware()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2, momentum=0.5), loss)
    return model


def imbalanced() -> keras.Model:
    """Rare events, by weights of the classes and a bias that starts where they are."""
    start = keras.initializers.Constant(float(np.log(0.1 / 0.9)))
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(16, "relu"), layers.Dense(1, "sigmoid", bias_initializer=start)]
    )
    metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=metrics)
    return model


def rare(batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    x, _ = points()
    return x, (x[:, 0] > 1.2).astype(np.float32)[:, None]


PROGRAMS = [
    Program("time series with an LSTM", forecast, windows),
    Program("mixed precision", half_precision, lambda size: pictures()),
    Program("accumulated gradients", accumulated, lambda size: points()),
    Program("metrics and clipping in a step of its own", own_step, weighted),
    Program("two outputs with weights of losses", two_tasks, two_targets, validates=True),
    Program("physics: a derivative in the loss", physics, times),
    Program("sharpness-aware minimization", sharpness_aware, lambda size: batches(points(), size)),
    Program("rare events with class weights", imbalanced, rare, options={"class_weight": {0: 1.0, 1: 5.0}}),
]
