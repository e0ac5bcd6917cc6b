"""Objects that a user may name in a config, good and bad."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdist.hooks import Hook


def build(learning_rate: float = 0.1, compiled: bool = True, **compile_arguments: Any) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    if compiled:
        model.compile(optimizer=keras.optimizers.SGD(learning_rate), loss="sparse_categorical_crossentropy")
    return model


def build_large(megabytes: float = 1.0) -> Any:
    """A model with a matrix so large that its parameters take `megabytes`."""
    import keras

    # Square, so that a step computes little.
    units = int((megabytes * 2**20 / 4) ** 0.5) - 5
    layers = [keras.layers.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(units)]
    model = keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.001), "sparse_categorical_crossentropy")
    return model


def build_other() -> Any:
    """`build` with one layer more, one that is wider, and another optimizer."""
    import keras

    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(4), layers.Dense(3, activation="softmax")])
    model.compile("adam", loss="sparse_categorical_crossentropy")
    return model


def build_decayed() -> Any:
    import keras

    model = build(compiled=False)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    return model


def slow_data() -> Any:
    import time

    print("reading", flush=True)
    # One long sleep would not notice a signal that comes right before it.
    for _ in range(600):
        time.sleep(0.1)


def build_own_train_step() -> Any:
    import models

    return models.own_train_step()


def not_a_model() -> int:
    return 3


def data(
    label_offset: int = 0, num_features: int = 6, scale: float = 1.0, password: str | None = None
) -> dict[str, Any]:
    from helpers import toy_data

    x, y = toy_data(256, num_features)
    return {"x": x * np.float32(scale), "y": y + label_offset, "validation_data": (x, y)}


def keras_form() -> Any:
    parts = data()
    return (parts["x"], parts["y"]), parts["validation_data"]


def split_form() -> Any:
    parts = data()
    return {"x": parts["x"], "y": parts["y"], "validation_split": 0.5}


def raising_dataset() -> dict[str, Any]:
    def dataset(context: Any) -> Any:
        raise KeyError("no such column")

    return {"x": dataset}


def uneven_data() -> dict[str, Any]:
    """Data of which worker 1 has none."""

    def dataset(context: Any) -> Any:
        import tensorflow as tf
        from helpers import toy_batches

        return toy_batches().take(tf.where(tf.equal(context.worker_index, 1), np.int64(0), np.int64(-1)))

    return {"x": dataset}


def slow_batches(seconds: float = 0.1) -> dict[str, Any]:
    """Data whose batches take some time each, without the CPU."""

    def dataset(context: Any) -> Any:
        from helpers import delayed, toy_batches

        return delayed(toy_batches(), seconds)

    return {"x": dataset}


def build_raising_loss() -> Any:
    import keras

    def loss(y: Any, prediction: Any) -> Any:
        raise RuntimeError("my loss failed")

    model = build(compiled=False)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    return model


def wrong_form() -> dict[str, Any]:
    return {"features": 1}


class RaisingHook(Hook):
    """Fails in the middle of training, with an error of its own or with one that looks like a lost task."""

    def __init__(self, unavailable: bool = False) -> None:
        self._unavailable = unavailable

    def after_run(self, context: Any, values: Any) -> None:
        import tensorflow as tf

        if values.global_step >= 100:
            raise (
                tf.errors.UnavailableError(None, None, "my hook failed")
                if self._unavailable
                else KeyError("my hook failed")
            )
