"""A model for two rings of points."""

import keras


def build(units: int = 16) -> keras.Model:
    """A compiled model of two inputs and two classes."""
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((2,)), layers.Dense(units, activation="relu"), layers.Dense(2, activation="softmax")]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
