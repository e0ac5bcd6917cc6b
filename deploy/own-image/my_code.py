"""A model and its data: replace them by yours."""

import keras
import numpy as np


def build_model(units: int = 16) -> keras.Model:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    x = np.random.default_rng(0).normal(size=(4096, 4)).astype("float32")
    y = x.sum(1)
    return (x[:3072], y[:3072]), (x[3072:], y[3072:])
