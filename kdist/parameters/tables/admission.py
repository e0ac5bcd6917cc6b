"""Chooses rows of a dynamic table to evict, and counts ids to admit: `Eviction` and `Admission` in TensorFlow.

The least recently used rows are found approximately: by a histogram of the ages of all rows, whose oldest bins go.
"""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from kdist.layers.dynamic_embedding import Eviction
from kdist.layers.initial_rows import mix_bits

#: The bins of ages, and the share of `max_rows` that stays when the oldest rows go.
_AGE_BINS, _LOW_WATER = 1024, 15 / 16


def excess_rows(max_rows: int | None, num_live: tf.Tensor) -> tf.Tensor:
    """The number of rows that have to go to keep `max_rows` on a server, of `num_live`: scalars int64."""
    if max_rows is None:
        return tf.zeros([], tf.int64)
    target = int(max_rows * _LOW_WATER)
    # Not for a few rows each time.
    return tf.where(num_live > (target + max_rows) // 2, num_live - target, 0)


def age_of_oldest(ages: tf.Tensor, excess: tf.Tensor) -> tf.Tensor:
    """The age, int32, from which on rows may go so that `excess` of them do; `ages`, int32 `[n]`, are of all rows."""
    width = tf.maximum(tf.reduce_max(ages) // _AGE_BINS + 1, 1)
    counts = tf.math.bincount(tf.maximum(ages // width, 0), minlength=_AGE_BINS, dtype=tf.int64)
    is_enough = tf.cumsum(counts, reverse=True) >= excess
    return tf.cast(tf.reduce_sum(tf.cast(is_enough, tf.int32)) - 1, tf.int32) * width


def rows_to_evict(
    eviction: Eviction, ages: tf.Tensor, counts: tf.Tensor, vectors: tf.Variable, rows: tf.Tensor
) -> tf.Tensor:
    """True for rows, int64 `[n]`, that go however many there are: bool `[n]`.

    `ages` and `counts`, int32 `[n]`, are the steps since the last update of each, and the number of its updates.
    """
    goes = tf.zeros_like(ages, tf.bool)
    if eviction.unseen_steps is not None:
        goes |= ages >= min(eviction.unseen_steps, tf.int32.max)
    if eviction.min_norm is not None:
        norms = tf.norm(tf.cast(vectors.sparse_read(rows), tf.float32), axis=1)
        goes |= (counts > 0) & (norms < eviction.min_norm)
    return goes


class CountMinSketch:
    """Counts keys in four tables of counters, where keys share counters; the least of a key's is never too small.

    After Cormode and Muthukrishnan (2005). From time to time all counters are halved, as in TinyLFU (Einziger et al.
    2017), so that what was rare long ago does not add up. It takes 4 MB on the device where it is made.
    """

    depth: ClassVar[int] = 4
    #: Counters of each table, a power of 2, and after how many counts they are halved.
    width: ClassVar[int] = 1 << 18
    counts_until_halved: ClassVar[int] = 8 << 18

    def __init__(self) -> None:
        self._counters = tf.Variable(tf.zeros([self.depth * self.width], tf.int32), trainable=False)
        self._total = tf.Variable(0, trainable=False, dtype=tf.int64)

    def count(self, keys: tf.Tensor, updates: list[tf.Operation]) -> tf.Tensor:
        """Counts keys, int64 `[n]`, each once, by operations that it adds to `updates`; traced, one call at a time.

        Returns the count of each, int32 `[n]`.
        """
        hashes = [tf.bitwise.bitwise_and(mix_bits(keys + row), self.width - 1) for row in range(self.depth)]
        places = tf.stack([of_row + row * self.width for row, of_row in enumerate(hashes)])
        counts = self._counters.sparse_read(places) + 1
        with tf.control_dependencies([counts]):
            ones = tf.ones_like(places, tf.int32)
            counted = tf.raw_ops.ResourceScatterAdd(resource=self._counters.handle, indices=places, updates=ones)
            total = self._total.assign_add(tf.size(keys, tf.int64))

        def halve() -> tf.Tensor:
            # Rows are read and written one by one elsewhere; this is the only place that takes all of them.
            halved = self._counters.assign(self._counters // 2)
            with tf.control_dependencies([halved]):
                return tf.identity(self._total.assign(total // 2))

        with tf.control_dependencies([counted]):
            updates.append(tf.cond(total > self.counts_until_halved, halve, lambda: total).op)
        return tf.reduce_min(counts, 0)
