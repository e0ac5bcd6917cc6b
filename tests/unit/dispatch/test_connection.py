from __future__ import annotations

import pytest
import tensorflow as tf

from kdist.cluster.spec import Task
from kdist.dispatch.connection import compute_device


def test_a_worker_computes_on_its_first_gpu_and_on_its_cpu_if_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Task("worker", 0), Task("worker", 1)
    gpu = "/job:worker/replica:0/task:1/device:GPU:0"
    devices = [tf.config.LogicalDevice("/device:GPU:0", "GPU"), tf.config.LogicalDevice(gpu, "GPU")]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: devices if kind == "GPU" else [])
    assert compute_device(first) == first.device
    assert compute_device(second) == gpu
