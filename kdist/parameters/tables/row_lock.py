"""`RowLock`: lets updates of rows follow one another."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf


class RowLock:
    """Lets the updates of several workers read and write rows one after the other, so that none undoes another one.

    It is on the server of the rows, where it is made, and nothing waits for another task while it is held. A call that
    ends early releases it.

    Args:
        is_shared: whether several workers make updates; otherwise nothing is locked.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._mutex = tf.raw_ops.MutexV2(shared_name=f"kdist_{uuid.uuid4().hex}") if is_shared else None

    @contextmanager
    def held(self, arrived: Sequence[tf.Tensor]) -> Iterator[list[tf.Operation]]:
        """Locked from when `arrived` is there until the operations have run that are added to the list; traced."""
        updates: list[tf.Operation] = []
        if self._mutex is None:
            yield updates
            return
        with tf.control_dependencies(arrived):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        with tf.control_dependencies([lock]):
            yield updates
        with tf.control_dependencies(updates):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
