"""`mirrored`: the devices of one machine, in one process, with averaged gradients.

What TF1 programs called towers. Over `tf.distribute.MirroredStrategy`, by a loop of kdist's own: Keras's `fit` fails
there with several steps in one call, moving averages that overwrite, and more.
"""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from kdist.errors import ConfigError
from kdist.strategies.all_reduce import AllReduce
from kdist.strategies.base import Program


class Mirrored(AllReduce):
    """One replica on each of several GPUs, or of several logical CPU devices.

    Args:
        num_devices: how many; all GPUs if None.
    """

    name: ClassVar[str] = "mirrored"

    def __init__(self, num_devices: int | None = None) -> None:
        super().__init__()
        self._num_devices = num_devices

    def start(self, program: Program) -> None:
        self._start(program, tf.distribute.MirroredStrategy(self._devices()))

    def _devices(self) -> list[str]:
        wanted = self._num_devices
        gpus = tf.config.list_logical_devices("GPU")
        devices = gpus if wanted is None or len(gpus) >= wanted else tf.config.list_logical_devices("CPU")
        if len(devices) < (wanted or 2):
            asked = "mirrored" if wanted is None else f"strategy.devices={wanted}"
            raise ConfigError(
                f"{asked} needs {wanted or 'at least 2'} devices; there are {len(gpus)} GPUs here (strategy.devices=2 "
                "makes two logical CPU devices)"
            )
        return [device.name for device in devices[:wanted]]


def make_logical_cpus(number: int) -> None:
    """Cuts the CPU into logical devices; before TensorFlow runs its first op, so only in a process of kdist's own."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
