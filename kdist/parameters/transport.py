"""How values travel between tasks: one fused tensor per server and dtype, and of tables only rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

K = TypeVar("K", bound=Hashable)


def fuse(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors of one dtype, flattened, one behind the other."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unfuse(fused: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Undoes `fuse`."""
    parts = tf.split(fused, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


def move_fused(
    tensors: Mapping[K, Any], route: Callable[[K], tuple[str, str]], read: Callable[[Any], tf.Tensor] = lambda t: t
) -> dict[K, tf.Tensor]:
    """Moves tensors between devices, fused by where they come from, where they go, and dtype.

    Args:
        tensors: what to move; anything with `dtype` and a fixed `shape`.
        route: key -> device it comes from, device it goes to; an empty name is the caller's device.
        read: makes a tensor of what is moved; called on the device it comes from.
    """
    groups: dict[tuple[str, str, tf.DType], list[K]] = defaultdict(list)
    for key, tensor in tensors.items():
        groups[(*route(key), tensor.dtype)].append(key)
    moved: dict[K, tf.Tensor] = {}
    for (source, target, _), keys in groups.items():
        with tf.device(source or None):
            fused = fuse([read(tensors[key]) for key in keys])
        with tf.device(target or None):
            moved |= zip(keys, unfuse(tf.identity(fused), [tensors[key].shape for key in keys]))
    return moved


def select_rows(slices: tf.IndexedSlices, start: int, stop: int) -> tf.IndexedSlices:
    """The rows `start` to `stop` of a sparse gradient, counted from `start`."""
    chosen = tf.where((slices.indices >= start) & (slices.indices < stop))[:, 0]
    return tf.IndexedSlices(tf.gather(slices.values, chosen), tf.gather(slices.indices, chosen) - start)


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once."""
    rows, positions = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows)), rows)
