"""Compiled models made at random, each with data in batches of two replicas, and the same data in joined batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

REPLICAS, STEPS = 2, 4


def summed(y: Any, y_pred: Any) -> Any:
    return ops.sum((ops.reshape(y, ops.shape(y_pred)) - y_pred) ** 2)


class AddsLoss(layers.Layer):
    """Adds a loss of the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.supports_masking = True
        self._how = how

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * (ops.sum if self._how == "sum" else ops.mean)(x**2))
        return x


class Padded(layers.Layer):
    """Ragged rows with zeros behind them, up to the longest that there may be."""

    def call(self, x: Any) -> Any:
        return x.to_tensor(shape=(None, 5)) if isinstance(x, tf.RaggedTensor) else x

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((x.shape[0], 5), x.dtype)


@dataclass(frozen=True)
class RandomModel:
    """A model and its data, both by the number of the draw.

    Attributes:
        choices: the parts of the model by name, to be shown.
    """

    seed: int
    choices: dict[str, Any]

    @staticmethod
    def draw(seed: int) -> RandomModel:
        rng = np.random.default_rng(seed)

        def one_of(*items: Any) -> Any:
            return items[rng.integers(len(items))]

        choices = {
            "outputs": one_of(1, 1, 2),
            "reduction": one_of("sum_over_batch_size", "sum_over_batch_size", "mean_with_sample_weight", "sum", None),
            "function": one_of(False, False, False, True),
            "masked": one_of(False, False, True),
            "regularizer": one_of(None, "l2"),
            "adds_loss": one_of(None, None, "mean", "sum"),
            "norm": one_of(None, None, None, "frozen", "frozen", "synchronized"),
            "frozen": one_of(False, False, True),
            "optimizer": one_of("sgd", "momentum", "adam", "clipped", "ema"),
            "weights": one_of(None, "random", "zero for a replica"),
            "metrics": one_of([], ["mae"], ["mae", "mse"]),
            "sizes": one_of("equal", "unequal", "last is smaller"),
            "ragged": one_of(False, False, True),
            "class_weight": one_of(None, None, {0: 0.5, 1: 2.0, 2: 1.0}),
        }
        if choices["function"]:
            # Keras multiplies the one number with the weight of each example.
            choices["weights"] = None
        elif choices["reduction"] is None:
            # Keras does not add such a loss to others.
            choices |= {"regularizer": None, "adds_loss": None}
        if choices["weights"] is not None or choices["outputs"] > 1 or choices["function"]:
            # Keras refuses it there.
            choices["class_weight"] = None
        return RandomModel(seed, choices)

    def build(self) -> keras.Model:
        c = self.choices
        keras.utils.set_random_seed(self.seed)
        ids = keras.Input((None,) if c["ragged"] else (5,), dtype="int32", ragged=c["ragged"])
        # Keeps the mask.
        x = layers.Embedding(20, 4, mask_zero=c["masked"])(Padded()(ids) if c["ragged"] else ids)
        x = layers.Dense(4, activation="tanh", kernel_regularizer=c["regularizer"], trainable=not c["frozen"])(x)
        if c["norm"] is not None:
            is_frozen = c["norm"] == "frozen"
            x = layers.BatchNormalization(synchronized=not is_frozen, trainable=not is_frozen)(x)
        if c["adds_loss"]:
            x = AddsLoss(c["adds_loss"])(x)
        outputs = [layers.Dense(1, name=f"out_{i}")(x) for i in range(c["outputs"])]
        model = keras.Model(ids, outputs if len(outputs) > 1 else outputs[0])
        loss = summed if c["function"] else keras.losses.MeanSquaredError(reduction=c["reduction"])
        losses, metrics = [loss] * len(outputs), [c["metrics"]] * len(outputs)
        alone = len(outputs) == 1
        model.compile(
            self._optimizer(),
            loss if alone else losses,
            metrics=c["metrics"] if alone else metrics,
            weighted_metrics=c["metrics"] if alone else metrics,
        )
        return model

    def _optimizer(self) -> keras.optimizers.Optimizer:
        sums = self.choices["reduction"] in ("sum", None) or self.choices["function"]
        rate = 0.001 if sums else 0.05
        return {
            "sgd": lambda: keras.optimizers.SGD(rate),
            "momentum": lambda: keras.optimizers.SGD(rate, momentum=0.9),
            # With a large epsilon, since a gradient near 0 has no certain direction. TensorFlow's kernel subtracts
            # beta_2 from 1 in float32, which is 1.3e-5 off at 0.999.
            "adam": lambda: keras.optimizers.Adam(0.01, beta_2=0.99, epsilon=0.1),
            "clipped": lambda: keras.optimizers.SGD(rate, global_clipnorm=0.5),
            "ema": lambda: keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.8),
        }[self.choices["optimizer"]]()

    def batches(self) -> Iterator[tuple[Any, ...]]:
        """One for each replica in turn, for each step."""
        rng = np.random.default_rng(self.seed)
        sizes = {"equal": (6, 6), "unequal": (7, 3), "last is smaller": (6, 6)}[self.choices["sizes"]]
        for step in range(STEPS):
            is_last = step == STEPS - 1 and self.choices["sizes"] == "last is smaller"
            for replica, size in enumerate((6, 2) if is_last else sizes):
                ids = rng.integers(0, 20, (size, 5)).astype(np.int32)
                y = rng.normal(size=(size, 5, 1)).astype(np.float32) + 3 * replica
                if self.choices["class_weight"] is not None:
                    y = rng.integers(0, 3, (size, 5, 1)).astype(np.float32)
                ys = (y, -y) if self.choices["outputs"] > 1 else y
                weights = rng.uniform(0.2, 2, (size, 5)).astype(np.float32)
                if self.choices["weights"] is None:
                    yield ids, ys
                    continue
                if self.choices["weights"] != "random" and replica == step % REPLICAS:
                    weights[:] = 0
                yield ids, ys, ((weights, weights) if self.choices["outputs"] > 1 else weights)

    def data(self) -> tf.data.Dataset:
        """The batches of the replicas."""
        return self._dataset(list(self.batches()))

    def joined(self) -> tf.data.Dataset:
        """The batches of all replicas together."""
        batches = list(self.batches())
        pairs = (batches[i : i + REPLICAS] for i in range(0, len(batches), REPLICAS))
        return self._dataset([tf.nest.map_structure(lambda *parts: np.concatenate(parts), *pair) for pair in pairs])

    def _dataset(self, batches: list[Any]) -> tf.data.Dataset:
        first, *others = (tf.data.Dataset.from_tensors(batch) for batch in batches)
        for other in others:
            first = first.concatenate(other)
        if self.choices["ragged"]:
            first = first.map(lambda ids, *others: (tf.RaggedTensor.from_tensor(ids, padding=0), *others))
        return first
