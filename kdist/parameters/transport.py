"""How values travel between tasks: one fused tensor per server and dtype, and of tables only rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

K = TypeVar("K", bound=Hashable)


def fuse(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors of one dtype, flattened, one behind the other."""
    flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def unfuse(fused: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Undoes `fuse`."""
    parts = [fused] if len(shapes) == 1 else tf.split(fused, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


@dataclass(frozen=True)
class Wire:
    """What tensors are while they travel.

    Attributes:
        dtype: floating-point tensors of more bits are rounded to it, to the nearest; None leaves all as they are.
    """

    dtype: tf.DType | None = None

    def pack(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor as it travels."""
        if self.dtype is None or not tensor.dtype.is_floating or tensor.dtype.size <= self.dtype.size:
            return tensor
        return tf.cast(tensor, self.dtype)

    @staticmethod
    def unpack(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The tensor as it was, when it has arrived."""
        return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


@dataclass(frozen=True)
class Fused:
    """Tensors that travel as one.

    Attributes:
        tensor: all of them, flattened, one behind the other, packed.
        shapes: their shapes, by their keys.
        dtype: what they are when they are not packed.
    """

    tensor: tf.Tensor
    shapes: dict[Any, tf.TensorShape]
    dtype: tf.DType

    def split(self) -> dict[Any, tf.Tensor]:
        """The tensors by their keys, on the device of the caller."""
        arrived = Wire.unpack(tf.identity(self.tensor), self.dtype)
        return dict(zip(self.shapes, unfuse(arrived, list(self.shapes.values()))))


def fuse_by(
    tensors: Mapping[K, Any],
    device_of: Callable[[K], str],
    read: Callable[[Any], tf.Tensor] = lambda tensor: tensor,
    *,
    on_source: bool = True,
    wire: Wire = Wire(),
) -> list[Fused]:
    """Fuses tensors by device and dtype.

    Args:
        tensors: what to fuse; anything with `dtype` and a fixed `shape`.
        device_of: key -> the device that the tensor comes from, or goes to.
        read: makes a tensor of what is fused.
        on_source: whether that is where it comes from, so that it is fused there; else it is fused on the caller's.
        wire: how they travel.
    """
    groups: dict[tuple[str, tf.DType], list[K]] = defaultdict(list)
    for key, tensor in tensors.items():
        groups[device_of(key), tensor.dtype].append(key)
    fused = []
    for (device, dtype), keys in groups.items():
        with tf.device(device) if on_source else nullcontext():
            packed = wire.pack(fuse([read(tensors[key]) for key in keys]))
        fused.append(Fused(packed, {key: tensors[key].shape for key in keys}, dtype))
    return fused


def select_rows(slices: tf.IndexedSlices, start: int, stop: int) -> tf.IndexedSlices:
    """The rows `start` to `stop` of a sparse gradient, counted from `start`."""
    chosen = tf.where((slices.indices >= start) & (slices.indices < stop))[:, 0]
    return tf.IndexedSlices(tf.gather(slices.values, chosen), tf.gather(slices.indices, chosen) - start)


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient with each row once."""
    rows, positions = tf.unique(slices.indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows)), rows)
