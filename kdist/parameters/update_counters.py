"""How each server counts the updates that it applies."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kdist.model.names import GLOBAL_STEP


class UpdateCounters:
    """The number of updates that each server has begun, and of phases that it has applied completely.

    The first server's count is the global step. The other servers count the updates that they apply themselves, so that
    none has to wait for another one before it applies what has arrived.

    Args:
        devices: one device per server.
        step: updates so far.
        num_phases: phases of an update.

    Attributes:
        begun, applied: scalar int64 variables, by server. If `applied` lags behind, a task was lost in the middle.
    """

    def __init__(self, devices: Sequence[str], step: int, num_phases: int) -> None:
        self._num_phases = num_phases
        self.begun = [_counter(device, step) for device in devices]
        self.applied = [_counter(device, step * num_phases) for device in devices]

    def global_step(self) -> int:
        """The exact number of updates."""
        return int(self.begun[0].numpy())

    def is_consistent(self) -> bool:
        """Whether every update that a server has started to apply was applied completely by all of them."""
        begun = {int(counter.numpy()) * self._num_phases for counter in self.begun}
        return len(begun | {int(counter.numpy()) for counter in self.applied}) == 1

    def align(self) -> None:
        """Resets every server's counters to the global step."""
        step = self.begun[0].read_value()
        for counter in self.begun[1:]:
            counter.assign(step)
        for counter in self.applied:
            counter.assign(step * self._num_phases)


def _counter(device: str, value: int) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(value, dtype=tf.int64, trainable=False, name=GLOBAL_STEP)
