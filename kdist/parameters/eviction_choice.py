"""Which rows of a dynamic table lose their places, as its `kdist.layers.Eviction` says.

The least recently used rows are found approximately: by a histogram of the ages of all rows, whose oldest bins go.
"""

from __future__ import annotations

import tensorflow as tf

from kdist.layers.dynamic_embedding import Eviction

#: How ages are told apart where the oldest rows go, and down to which share of `max_rows`.
_AGE_BINS, _LOW_WATER = 1024, 15 / 16


class EvictionChoice:
    """Chooses rows; its methods are called while a sweep is traced.

    Args:
        eviction: the rule.
        max_rows: how many rows this server may have; None for any number.
    """

    def __init__(self, eviction: Eviction, max_rows: int | None) -> None:
        self._eviction = eviction
        self._max_rows = max_rows

    def excess(self, num_live: tf.Tensor) -> tf.Tensor:
        """How many rows have to go to keep `max_rows`, of `num_live`: scalars int64."""
        if self._max_rows is None:
            return tf.zeros([], tf.int64)
        target = int(self._max_rows * _LOW_WATER)
        # Not for a few rows each time.
        return tf.where(num_live > (target + self._max_rows) // 2, num_live - target, 0)

    @staticmethod
    def oldest(ages: tf.Tensor, excess: tf.Tensor) -> tf.Tensor:
        """From which age on rows may go so that `excess` of them do, int32; `ages`, int32 `[n]`, are those of all."""
        width = tf.maximum(tf.reduce_max(ages) // _AGE_BINS + 1, 1)
        counts = tf.math.bincount(tf.maximum(ages // width, 0), minlength=_AGE_BINS, dtype=tf.int64)
        is_enough = tf.cumsum(counts, reverse=True) >= excess
        return tf.cast(tf.reduce_sum(tf.cast(is_enough, tf.int32)) - 1, tf.int32) * width

    def goes(self, ages: tf.Tensor, counts: tf.Tensor, vectors: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
        """Which rows go whatever their number is: bool `[n]`.

        Args:
            ages: steps since each was last updated, int32 `[n]`.
            counts: how often each was updated, int32 `[n]`.
            vectors: of all rows.
            rows: int64 `[n]`.
        """
        goes = tf.zeros_like(ages, tf.bool)
        if self._eviction.unseen_steps is not None:
            goes |= ages >= min(self._eviction.unseen_steps, tf.int32.max)
        if self._eviction.min_norm is not None:
            norms = tf.norm(tf.cast(vectors.sparse_read(rows), tf.float32), axis=1)
            goes |= (counts > 0) & (norms < self._eviction.min_norm)
        return goes
