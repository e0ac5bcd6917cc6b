"""`mirrored`: the devices of one machine, in one process, with averaged gradients.

TF1 programs called them towers. Over `tf.distribute.MirroredStrategy`, by a loop of kdist's own: Keras's `fit` fails
there with several steps in one call, moving averages that overwrite, and more.
"""

from __future__ import annotations

from typing import ClassVar

import tensorflow as tf

from kdist._compat.collectives import NumberedMirroredStrategy, number_collectives_when_traced
from kdist.config.schema import MirroredOptions
from kdist.errors import ConfigError
from kdist.strategies.all_reduce import AllReduce
from kdist.strategies.base import TrainingSpec


class Mirrored(AllReduce):
    """One replica on each of several GPUs, or of several logical CPU devices.

    Args:
        options: the number of devices; so many must exist, see `logical_cpus_needed`.
    """

    name: ClassVar[str] = "mirrored"

    def __init__(self, *, options: MirroredOptions) -> None:
        super().__init__()
        self._num_devices = options.devices
        self.batches_per_step = options.devices or num_gpus()

    def start(self, spec: TrainingSpec) -> None:
        number_collectives_when_traced()
        gpus, cpus = (tf.config.list_logical_devices(kind) for kind in ("GPU", "CPU"))
        number = self._num_devices or len(gpus)
        devices = (gpus if len(gpus) >= number else cpus)[:number]
        self._start(spec, NumberedMirroredStrategy([device.name for device in devices]))


def logical_cpus_needed(num_devices: int | None) -> int:
    """The number of logical CPU devices to make before `mirrored` can run in a process; 0 if none.

    Raises:
        ConfigError: no number was given, and there are not several GPUs.
    """
    gpus = num_gpus()
    if num_devices is None and gpus < 2:
        raise ConfigError(
            f"strategy=mirrored needs at least 2 devices, and there {'is 1 GPU' if gpus else 'are no GPUs'} here; "
            "strategy.devices=2 makes two logical CPU devices"
        )
    num_cpus = _num_logical("CPU")
    return 0 if num_devices is None or max(gpus, num_cpus) >= num_devices else num_devices


def num_gpus() -> int:
    """The number of GPUs here; one that the program has cut into logical devices counts as so many."""
    return _num_logical("GPU")


def _num_logical(kind: str) -> int:
    # `list_logical_devices` would make them, after which the CPU cannot be cut any more.
    devices = tf.config.list_physical_devices(kind)
    return sum(len(tf.config.get_logical_device_configuration(device) or [None]) for device in devices)


def make_logical_cpus(number: int) -> None:
    """Cuts the CPU into logical devices; before TensorFlow runs its first op, so only in a process of kdist's own."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
