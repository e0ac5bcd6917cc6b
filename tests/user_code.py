"""What a user may name in a config, good and bad."""

from __future__ import annotations

from typing import Any

import numpy as np


def build(learning_rate: float = 0.1, compiled: bool = True, **compile_arguments: Any) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    if compiled:
        model.compile(optimizer=keras.optimizers.SGD(learning_rate), loss="sparse_categorical_crossentropy")
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
    time.sleep(60)


def build_own_train_step() -> Any:
    import models

    return models.own_train_step()


def not_a_model() -> int:
    return 3


def data(label_offset: int = 0, num_features: int = 6, scale: float = 1.0) -> dict[str, Any]:
    from helpers import toy_data

    x, y = toy_data(256, num_features)
    return {"x": x * np.float32(scale), "y": y + label_offset, "validation_data": (x, y)}


def keras_form() -> Any:
    parts = data()
    return (parts["x"], parts["y"]), parts["validation_data"]


def raising_dataset() -> dict[str, Any]:
    def dataset(context: Any) -> Any:
        raise KeyError("no such column")

    return {"x": dataset}


def wrong_form() -> dict[str, Any]:
    return {"features": 1}
