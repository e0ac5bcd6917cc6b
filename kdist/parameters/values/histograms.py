"""The distributions of stored parameters, counted where they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from kdist.parameters.values.named_values import NamedValues, Slice
from kdist.parameters.values.slices import read_run

#: As many as TensorBoard makes of values that it is given.
_NUM_BUCKETS = 30


def histograms_of(values: NamedValues) -> Callable[[], dict[str, np.ndarray]]:
    """Traces functions that count elements on the devices that hold them: only ranges and counts travel.

    Args:
        values: of floating point, named `parameters/...`; the others have no histogram.

    Returns:
        Returns for each value its buckets: float64 `[n, 3]`, of each its lower end, upper end and number of elements. A
        value that is not finite has none.
    """
    slices: dict[str, list[Slice]] = defaultdict(list)
    for each in values.slices():
        if each.name.startswith("parameters/") and each.variable.dtype.is_floating:
            slices[each.name].append(each)

    def count(ranges: tf.Tensor) -> tf.Tensor:
        before: dict[str, list[tf.Tensor]] = defaultdict(list)
        return tf.stack([_count_all(of_name, ranges[i], before) for i, of_name in enumerate(slices.values())])

    find = tf.function(lambda: tf.stack(list(map(_range, slices.values()))), autograph=False).get_concrete_function()
    counts = tf.function(count, autograph=False).get_concrete_function(tf.TensorSpec([len(slices), 2], tf.float64))

    def read() -> dict[str, np.ndarray]:
        ranges = find().numpy()
        found = {}
        for name, (low, high), of_name in zip(slices, ranges, counts(tf.constant(ranges)).numpy()):
            if np.isfinite([low, high]).all():
                edges = np.linspace(low, high, _NUM_BUCKETS + 1)
                found[name] = np.stack([edges[:-1], edges[1:], of_name], 1)
        return found

    return read


def _range(slices: Sequence[Slice]) -> tf.Tensor:
    """The smallest and the largest element of a value, float64 `[2]`."""
    ends = []
    for each in slices:
        with tf.device(each.variable.device):
            (value,) = read_run([each])
            ends.append(tf.cast(tf.stack([tf.reduce_min(value), tf.reduce_max(value)]), tf.float64))
    lows, highs = tf.unstack(tf.stack(ends), axis=1)
    return tf.stack([tf.reduce_min(lows), tf.reduce_max(highs)])


def _count_all(slices: Sequence[Slice], limits: tf.Tensor, before: dict[str, list[tf.Tensor]]) -> tf.Tensor:
    """The number of elements of a value in each bucket, float64 `[buckets]`, after others of the same device."""
    counts = []
    for each in slices:
        device = each.variable.device
        # One after the other: counting needs memory for the number of the bucket of each element.
        with tf.device(device), tf.control_dependencies(before[device]):
            (value,) = read_run([each])
            value = value if value.dtype.size >= tf.float32.size else tf.cast(value, tf.float32)
            before[device] = [_count(value, tf.cast(limits, value.dtype))]
        counts += before[device]
    return tf.add_n(counts)


def _count(value: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
    """The number of elements in each bucket between two limits, float64 `[buckets]`; any if one is infinite."""
    is_known = tf.reduce_all(tf.math.is_finite(limits)) & (limits[0] < limits[1])
    return tf.cond(
        is_known,
        lambda: tf.cast(tf.histogram_fixed_width(value, limits, _NUM_BUCKETS, tf.int32), tf.float64),
        # Where TensorBoard counts equal elements.
        lambda: tf.one_hot(_NUM_BUCKETS - 1, _NUM_BUCKETS, dtype=tf.float64) * tf.size(value, tf.float64),
    )
