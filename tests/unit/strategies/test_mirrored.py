from __future__ import annotations

import pytest
import tensorflow as tf

from kdist.errors import ConfigError
from kdist.strategies.mirrored import logical_cpus_needed


def cut_gpu(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Lets TensorFlow say that there is one GPU, which the program has cut into `parts` logical devices."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    list_devices, configuration_of = tf.config.list_physical_devices, tf.config.get_logical_device_configuration
    configuration = [tf.config.LogicalDeviceConfiguration(memory_limit=1)] * parts if parts > 1 else None
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [gpu] if kind == "GPU" else list_devices(kind)
    )
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda device: configuration if device == gpu else configuration_of(device),
    )


@pytest.mark.parametrize("devices", [None, 2])
def test_a_gpu_that_was_cut_counts_as_so_many(devices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_gpu(monkeypatch, 2)
    assert logical_cpus_needed(devices) == 0


def test_one_gpu_is_not_several(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_gpu(monkeypatch, 1)
    assert logical_cpus_needed(2) == 2
    with pytest.raises(ConfigError, match="there is 1 GPU here"):
        logical_cpus_needed(None)
