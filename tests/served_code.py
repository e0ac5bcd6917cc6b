"""Models and data that are named in configs, and used after training: by evaluating, predicting and exporting."""

from __future__ import annotations

from typing import Any

import numpy as np


def build(use_ema: bool = False, units: int = 4) -> Any:
    """Two inputs by name, two outputs by name; moving averages if wanted."""
    import keras

    numbers, size = keras.layers.Input((3,), name="numbers"), keras.layers.Input((1,), name="size", dtype="int32")
    hidden = keras.layers.Dense(units, activation="tanh")(
        keras.layers.Concatenate()([numbers, keras.ops.cast(size, "float32")])
    )
    outputs = {"kind": keras.layers.Dense(3, activation="softmax")(hidden), "price": keras.layers.Dense(1)(hidden)}
    model = keras.Model({"numbers": numbers, "size": size}, outputs)
    optimizer = keras.optimizers.SGD(0.05, use_ema=use_ema, ema_momentum=0.9)
    model.compile(
        optimizer, {"kind": "sparse_categorical_crossentropy", "price": "mse"}, metrics={"kind": ["accuracy"]}
    )
    return model


def build_other() -> Any:
    """`build` with another hidden layer."""
    return build(units=5)


def columns(num_rows: int = 256, seed: int = 3) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    numbers = random.normal(size=(num_rows, 3)).astype(np.float32)
    size = random.integers(0, 5, (num_rows, 1)).astype(np.int32)
    return {"numbers": numbers, "size": size}, {"kind": numbers.argmax(1), "price": numbers.sum(1) * size[:, 0]}


def data(seed: int = 3) -> dict[str, Any]:
    print("reading", flush=True)
    x, y = columns(seed=seed)
    return {"x": x, "y": y, "validation_data": columns(100, seed + 1)}


def not_validated() -> dict[str, Any]:
    x, y = columns()
    return {"x": x, "y": y}


def endless() -> dict[str, Any]:
    import tensorflow as tf

    return {**not_validated(), "validation_data": tf.data.Dataset.from_tensors(columns(4)).repeat()}


def build_words() -> Any:
    """A row for each word, and averages of the rows."""
    import keras

    from kdist.layers import DynamicEmbedding

    words = keras.layers.Input((2,), dtype="string", name="words")
    rows = DynamicEmbedding(4, "string", combiner="mean")(words)
    model = keras.Model(words, keras.layers.Dense(1)(rows))
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse")
    return model


def words() -> dict[str, Any]:
    import tensorflow as tf

    numbers = np.random.default_rng(5).integers(0, 30, (256, 2))
    x = tf.constant(np.array([f"wort {number}" for number in range(30)])[numbers])
    y = numbers.mean(1, keepdims=True).astype(np.float32) / 30
    return {"x": x, "y": y, "validation_data": (x[:128], y[:128])}


def build_subclassed() -> Any:
    """Without `keras.Input`s: built for the batches that it gets."""
    import keras

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(3, activation="softmax")

        def call(self, inputs: Any) -> Any:
            return self.out(inputs["numbers"])

    model = Own()
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def kinds() -> dict[str, Any]:
    x, y = columns()
    return {"x": {"numbers": x["numbers"]}, "y": y["kind"], "validation_data": ({"numbers": x["numbers"]}, y["kind"])}


def records() -> Any:
    """Inputs from TFRecords, as a function of the user reads them."""
    import tempfile

    import tensorflow as tf

    x, _ = columns(40)
    path = tempfile.mktemp()
    with tf.io.TFRecordWriter(path) as file:
        for numbers, size in zip(x["numbers"], x["size"]):
            file.write(tf.io.serialize_tensor(tf.constant([*numbers, size[0]], tf.float32)).numpy())

    def parsed(record: Any) -> Any:
        values = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [4])
        return {"numbers": values[:3], "size": tf.cast(values[3:], tf.int32)}

    return tf.data.TFRecordDataset(path).map(parsed).batch(16)
