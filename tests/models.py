"""Models for the tests, of every kind that a user may bring."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def mlp(optimizer: Any = "adam", **compile_arguments: Any) -> keras.Model:
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3, activation="softmax")]
    )
    model.compile(
        **{
            "optimizer": optimizer,
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            **compile_arguments,
        }
    )
    return model


def batch_normalized(optimizer: Any = "sgd") -> keras.Model:
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, kernel_regularizer="l2"), layers.BatchNormalization(), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


@keras.saving.register_keras_serializable("tests")
class Activity(layers.Layer):
    """Adds a loss of its own."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def two_inputs_two_outputs(optimizer: Any = "adam") -> keras.Model:
    """Dict inputs of different types, dict outputs with their own losses and metrics, and an added loss."""
    numbers = layers.Input((6,), name="numbers")
    category = layers.Input((1,), name="category", dtype="int32")
    embedded = layers.Flatten()(layers.Embedding(5, 4)(category))
    hidden = Activity()(layers.Dense(8, activation="relu")(layers.Concatenate()([numbers, embedded])))
    outputs = {"label": layers.Dense(3, activation="softmax")(hidden), "size": layers.Dense(1)(hidden)}
    model = keras.Model({"numbers": numbers, "category": category}, outputs)
    model.compile(
        optimizer=optimizer,
        loss={"label": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"label": 1.0, "size": 0.3},
        metrics={"label": ["accuracy"], "size": ["mae"]},
    )
    return model


def lists(optimizer: Any = "adam") -> keras.Model:
    """Lists of inputs and of outputs."""
    left, right = layers.Input((6,)), layers.Input((6,))
    hidden = layers.Dense(8, activation="tanh")(layers.Concatenate()([left, right]))
    outputs = [layers.Dense(3, activation="softmax", name="label")(hidden), layers.Dense(1, name="size")(hidden)]
    model = keras.Model([left, right], outputs)
    model.compile(optimizer=optimizer, loss=["sparse_categorical_crossentropy", "mse"])
    return model


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """Two inputs as a tuple, its own compute_loss, and a metric of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8, activation="tanh")
        self.out = layers.Dense(3)
        self.seen = keras.metrics.Mean(name="mean_logit")

    def call(self, inputs: Any) -> Any:
        left, right = inputs
        return self.out(self.hidden(left + 2.0 * right))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:  # type: ignore[override]
        loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.seen.update_state(y_pred)
        return self.get_metrics_result()


def subclassed(optimizer: Any = "rmsprop") -> keras.Model:
    model = Subclassed()
    model.compile(optimizer=optimizer)
    return model


def dropout(rate: float = 0.5) -> keras.Model:
    model = keras.Sequential(
        [layers.Input((6,)), layers.Dense(64), layers.Dropout(rate), layers.Dense(3, activation="softmax")]
    )
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    return model


class OwnTrainStep(keras.Model):
    """Its `train_step` does not return what Keras expects."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def train_step(self, data: Any) -> Any:
        super().train_step(data)


def own_train_step() -> keras.Model:
    model = OwnTrainStep()
    model.compile(optimizer="sgd", loss="mse")
    return model
