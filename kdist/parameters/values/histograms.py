"""`Histograms`: the distributions of stored parameters, counted where they are."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import tensorflow as tf

from kdist.parameters.values.named_values import NamedValues, Slice
from kdist.parameters.values.slices import read_run

#: As many as TensorBoard makes of values that it is given.
_NUM_BUCKETS = 30


class Histograms:
    """Counts elements on the devices that hold them: only ranges and counts travel.

    Args:
        values: of floating point, named `parameters/...`; the others have no histogram.
    """

    def __init__(self, values: NamedValues) -> None:
        self._slices: dict[str, list[Slice]] = defaultdict(list)
        for each in values.slices():
            if each.name.startswith("parameters/") and each.variable.dtype.is_floating:
                self._slices[each.name].append(each)
        names = tf.TensorSpec([len(self._slices), 2], tf.float64)
        self._ranges = tf.function(self._find_ranges, autograph=False).get_concrete_function()
        self._counts = tf.function(self._count, autograph=False).get_concrete_function(names)

    def read(self) -> dict[str, np.ndarray]:
        """For each value its buckets: float64 `[n, 3]`, of each its lower end, upper end and number of elements.

        A value that is not finite has none.
        """
        ranges = self._ranges().numpy()
        counts = self._counts(tf.constant(ranges)).numpy()
        found = {}
        for name, (low, high), of_name in zip(self._slices, ranges, counts):
            if np.isfinite([low, high]).all():
                edges = np.linspace(low, high, _NUM_BUCKETS + 1)
                found[name] = np.stack([edges[:-1], edges[1:], of_name], 1)
        return found

    def _find_ranges(self) -> tf.Tensor:
        """The smallest and the largest element of each value, float64 `[values, 2]`."""
        ranges = []
        for slices in self._slices.values():
            ends = []
            for each in slices:
                with tf.device(each.variable.device):
                    (value,) = read_run([each])
                    ends.append(tf.cast(tf.stack([tf.reduce_min(value), tf.reduce_max(value)]), tf.float64))
            lows, highs = tf.unstack(tf.stack(ends), axis=1)
            ranges.append(tf.stack([tf.reduce_min(lows), tf.reduce_max(highs)]))
        return tf.stack(ranges)

    def _count(self, ranges: tf.Tensor) -> tf.Tensor:
        """The number of elements of each value in each bucket, float64 `[values, buckets]`."""
        counts, before = [], defaultdict[str, list[tf.Tensor]](list)
        for i, slices in enumerate(self._slices.values()):
            of_slices = []
            for each in slices:
                device = each.variable.device
                # One after the other: counting needs memory for the number of the bucket of each element.
                with tf.device(device), tf.control_dependencies(before[device]):
                    (value,) = read_run([each])
                    value = value if value.dtype.size >= tf.float32.size else tf.cast(value, tf.float32)
                    counted = _count(value, tf.cast(ranges[i], value.dtype))
                before[device] = [counted]
                of_slices.append(counted)
            counts.append(tf.add_n(of_slices))
        return tf.stack(counts)


def _count(value: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
    """The number of elements in each bucket between two limits, float64 `[buckets]`; any if one is infinite."""
    is_known = tf.reduce_all(tf.math.is_finite(limits)) & (limits[0] < limits[1])

    def count() -> tf.Tensor:
        return tf.cast(tf.histogram_fixed_width(value, limits, _NUM_BUCKETS, tf.int32), tf.float64)

    def last() -> tf.Tensor:
        # Where TensorBoard counts equal elements.
        return tf.one_hot(_NUM_BUCKETS - 1, _NUM_BUCKETS, dtype=tf.float64) * tf.size(value, tf.float64)

    return tf.cond(is_known, count, last)
