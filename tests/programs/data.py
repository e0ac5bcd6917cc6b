"""Data made up for the programs, small and the same every time; something can be learned from each."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from programs.program import EXAMPLES

SIZE = 12
_WORDS = ("red", "green", "blue", "small", "large", "old", "new", "round")


def pictures(size: int = SIZE, channels: int = 3, number: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of 0 to 1, float32 `(number, size, size, channels)`; the label says which quarter is bright."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, number)
    images = rng.uniform(0, 0.4, (number, size, size, channels)).astype(np.float32)
    half = size // 2
    for image, label in zip(images, labels):
        top, left = half * (label // 2), half * (label % 2)
        image[top : top + half, left : left + half] += 0.6
    return images, labels


def batches(values: Any, batch_size: int) -> tf.data.Dataset:
    """A dataset of full batches; lone arrays make lone elements."""
    return tf.data.Dataset.from_tensor_slices(values).batch(batch_size, drop_remainder=True).prefetch(2)


def gray(batch_size: int) -> tf.data.Dataset:
    """Pictures alone, of one channel."""
    return batches(pictures(channels=1)[0], batch_size)


def sequences(length: int, vocabulary: int, number: int = EXAMPLES) -> np.ndarray:
    """Numbers from 2 up that count on from a random start, int32 `(number, length)`; ends are padded with 0."""
    rng = np.random.default_rng(2)
    counted = 2 + (rng.integers(0, 6, (number, 1)) + np.arange(length)) % (vocabulary - 2)
    ends = rng.integers(length // 2, length + 1, (number, 1))
    return np.where(np.arange(length) < ends, counted, 0).astype(np.int32)


def sentences(number: int = EXAMPLES) -> tuple[list[str], np.ndarray]:
    """Sentences of five words, and whether they say `new`."""
    rng = np.random.default_rng(3)
    chosen = [list(rng.choice(_WORDS, 5)) for _ in range(number)]
    return [" ".join(words) for words in chosen], np.array(["new" in words for words in chosen]).astype(np.float32)


def vocabulary() -> list[str]:
    """The words of `sentences`."""
    return list(_WORDS)
