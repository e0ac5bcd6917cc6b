"""The dynamic scale of a loss, with the arithmetic of Keras's `LossScaleOptimizer`, where the updates are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from kdist.model.names import DROPPED_STEPS, DYNAMIC_SCALE, DYNAMIC_SCALE_STEPS


class ServerLossScale:
    """The scale on the first server, and on every server the number of steps that it has dropped.

    A step whose gradients overflow updates no parameter, and halves the scale; after `dynamic_growth_steps` steps
    without an overflow, the scale doubles (Micikevicius et al., Mixed Precision Training, 2018). Several asynchronous
    workers whose gradients overflow with the same scale halve it once.

    Args:
        optimizer: of the model, built: the scale begins as it is there.
        devices: of the servers.
    """

    def __init__(self, optimizer: keras.optimizers.LossScaleOptimizer, devices: Sequence[str]) -> None:
        self._growth_steps = optimizer.dynamic_growth_steps
        with tf.device(devices[0]):
            self._scale = tf.Variable(optimizer.dynamic_scale.numpy(), dtype=tf.float32, trainable=False)
            self._steps = tf.Variable(optimizer.step_counter.numpy(), dtype=tf.int32, trainable=False)
        self._dropped = []
        for device in devices:
            with tf.device(device):
                self._dropped.append(tf.Variable(0, dtype=tf.int64, trainable=False))

    @property
    def variables(self) -> dict[str, list[tf.Variable]]:
        """The variables by name, with all copies of each."""
        return {DYNAMIC_SCALE: [self._scale], DYNAMIC_SCALE_STEPS: [self._steps], DROPPED_STEPS: self._dropped}

    def read(self) -> tf.Tensor:
        """The scale, a float32 scalar on the first server."""
        with tf.device(self._scale.device):
            return self._scale.read_value()

    def align(self) -> None:
        """Resets every server's count of dropped steps to that of the first one."""
        for count in self._dropped[1:]:
            count.assign(self._dropped[0].read_value())

    def apply(self, server: int, overflow: tf.Tensor, step: tf.Tensor, update: Callable[[tf.Tensor], None]) -> None:
        """Updates the variables of a server, unless the step has overflowed; traced on that server.

        Args:
            overflow: `ReplicaOutput.overflow`.
            step: scalar int64: the number of steps before this one.
            update: what is to be done; its argument is the number of steps before this one that were not dropped.
        """
        is_dropped = overflow > 0
        iteration = step - self._dropped[server].read_value()

        def update_once() -> None:
            update(iteration)

        tf.cond(is_dropped, lambda: None, update_once)
        self._dropped[server].assign_add(tf.cast(is_dropped, tf.int64), read_value=False)
        if server == 0:
            steps = tf.where(is_dropped, 0, self._steps.read_value() + 1)
            grows = steps >= self._growth_steps
            scale = self._scale.read_value()
            grown = tf.where(grows, 2 * scale, scale)
            self._scale.assign(tf.where(is_dropped, tf.minimum(scale, 0.5 * overflow), grown), read_value=False)
            self._steps.assign(tf.where(grows, 0, steps), read_value=False)
