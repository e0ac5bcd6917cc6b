"""`CountMinSketch`: how often each of any number of keys was seen, roughly, in a fixed amount of memory."""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from kdist.layers.initial_rows import mixed


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
        """Counts keys once more; traced, and one call after the other.

        Args:
            keys: int64 `[n]`, each once.
            updates: the operations that count are added.

        Returns:
            How often each was counted, int32 `[n]`.
        """
        hashes = [tf.bitwise.bitwise_and(mixed(keys + row), self.width - 1) for row in range(self.depth)]
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
