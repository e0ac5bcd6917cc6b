"""Keys of rows of dynamic tables: what an id is known by in the index of a server, and which server that is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from kdist.layers.initial_rows import mixed
from kdist.model.table_groups import TableGroup


def key_shifts(group: TableGroup) -> np.ndarray:
    """What is added to an id to get its key, by table, so that tables of a group can share an index: int64 `[tables]`.

    Keys of ids between minus and plus 2^63 / (number of tables) differ for sure; of hashes, with a probability like
    that of two hashes of 64 bits.
    """
    count = len(group.tables)
    return np.array([(table * (1 << 64) // count + (1 << 63)) % (1 << 64) - (1 << 63) for table in range(count)])


def server_of(keys: tf.Tensor, num_servers: int) -> tf.Tensor:
    """The number of the server that has a key, int32 `[n]`."""
    bits = tf.bitwise.bitwise_and(mixed(keys), tf.constant((1 << 40) - 1, tf.int64))
    return tf.cast(bits % num_servers, tf.int32)


def split_by_server(keys: tf.Tensor, num_servers: int) -> Sequence[tf.Tensor]:
    """Which keys each server has: int32 `[n]` for each."""
    places = tf.range(tf.size(keys))
    if num_servers == 1:
        return [places]
    return tf.dynamic_partition(places, server_of(keys, num_servers), num_servers)
