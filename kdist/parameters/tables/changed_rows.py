"""The intervals between saves, by which a delta has only the rows of tables that have changed since a save.

Time is cut into intervals by saves. Every server has the number of the present one, and marks a row that changes with
it; a delta has the rows with the mark of a later interval than that of the checkpoint which it follows. So nothing has
to be cleared, and what a failed save did not write stays marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class DeltaBase:
    """The checkpoint that a delta follows.

    Attributes:
        step: its global step.
        interval: ended by it.
    """

    step: int
    interval: int


class SaveIntervals:
    """The number of the present interval, on each server.

    Attributes:
        of_servers: scalar int32.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._present = 1
        self.of_servers: list[tf.Variable] = []
        for device in devices:
            with tf.device(device):
                self.of_servers.append(tf.Variable(self._present, dtype=tf.int32, trainable=False))

    def next(self) -> int:
        """Begins another interval; returns the number of the one that it ends. Nothing may change rows meanwhile."""
        self._present += 1
        for variable in self.of_servers:
            variable.assign(self._present)
        return self._present - 1
