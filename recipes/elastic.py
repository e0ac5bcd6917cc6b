"""MNIST for the recipe `elastic`, read as slowly as from storage that is far away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from kdist.recipes import mnist

if TYPE_CHECKING:
    import tensorflow as tf

    from kdist.data.base import DataContext


def load_data(read_secs: float = 0.03, path: str | None = None) -> dict[str, Any]:
    """MNIST as the data arguments of `fit`; a worker waits `read_secs` for each batch, without using the CPU."""
    data = mnist.load_data(path)
    images, labels = (data["x"] * 255).astype(np.uint8), data["y"]

    def read(context: DataContext) -> tf.data.Dataset:
        import tensorflow as tf

        own = tf.data.Dataset.from_tensor_slices((images, labels)).shard(context.num_workers, context.worker_index)
        batches = own.shuffle(len(images)).repeat().batch(context.batch_size or 64, drop_remainder=True)
        slow = tf.raw_ops.ExperimentalSleepDataset(
            input_dataset=tf.data.experimental.to_variant(batches),
            sleep_microseconds=tf.constant(round(read_secs * 1e6), tf.int64),
            output_types=[spec.dtype for spec in batches.element_spec],
            output_shapes=[spec.shape for spec in batches.element_spec],
        )
        arrived = tf.data.experimental.from_variant(slow, batches.element_spec)
        return arrived.map(lambda image, label: (tf.cast(image, tf.float32) / 255.0, label))

    return {**data, "x": read, "y": None}
