"""Data that only one process can read, of every kind that Keras takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from helpers import toy_data

X, Y = toy_data(50)
BATCH = 8


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Of `toy_data`; the last one, number 6, is partial."""
    return X[BATCH * number : BATCH * (number + 1)], Y[BATCH * number : BATCH * (number + 1)]


class Batches(keras.utils.PyDataset):
    """Seven batches; records what Keras calls."""

    def __init__(self, size: int = 7, fails_at: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size, self.fails_at = size, fails_at
        self.calls: list[Any] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        self.calls.append(number)
        if number == self.fails_at:
            raise LookupError("no such file")
        return batch(number)

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


def generator(times: int = 1, size: int = 7) -> Iterator[Any]:
    for _ in range(times):
        yield from map(batch, range(size))


def weighted(times: int = 1) -> Iterator[Any]:
    for x, y in generator(times):
        yield x, y, np.where(y == 0, 2.0, 0.5).astype(np.float32)


def filtered() -> tf.data.Dataset:
    """Batches of unknown length."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: y != 2)
    return dataset.batch(BATCH)


def with_python_function() -> tf.data.Dataset:
    """Batches of known length that cannot travel."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))

    def twice(x: tf.Tensor, y: tf.Tensor) -> Any:
        x = tf.ensure_shape(tf.numpy_function(lambda v: 2 * v, [x], tf.float32), [6])
        return x, y

    return dataset.map(twice).batch(BATCH)


def from_generator() -> tf.data.Dataset:
    """Batches of unknown length that cannot travel."""
    spec = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int64))
    return tf.data.Dataset.from_generator(generator, output_signature=spec)


def sparse_matrix() -> Any:
    import scipy.sparse

    return scipy.sparse.csr_matrix(np.where(X > 0, X, 0))
