"""Data that workers evaluate in parts, and data that they leave to the chief."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from kdist._compat.tensorflow import function_for_tasks
from kdist.evaluation.on_workers import shards_of

RAGGED = tf.RaggedTensor.from_uniform_row_length(np.arange(256, dtype=np.float32), 2)


def test_arrays_are_cut_between_batches() -> None:
    shards = shards_of(np.zeros((100, 2)), np.zeros(100), None, 32, 2)
    assert shards is not None
    assert [[len(argument()[0]) for argument in shards.arguments(i)] for i in (0, 1)] == [[64, 64], [36, 36]]


@pytest.mark.parametrize("x", [RAGGED, {"a": RAGGED.to_sparse(), "b": np.zeros(128)}], ids=["ragged", "sparse"])
def test_ragged_and_sparse_tensors_are_left_to_the_chief(x: Any) -> None:
    assert shards_of(x, np.zeros(128), None, 32, 2) is None


@pytest.mark.parametrize("x", [np.zeros((100, 2)), tf.data.Dataset.range(100).batch(10)], ids=["arrays", "dataset"])
def test_tracing_what_reads_a_shard_prints_nothing(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda *message: said.append(message))
    shards = shards_of(x, None, None, 32, 2)
    assert shards is not None
    function_for_tasks(shards.dataset, tf.TensorSpec([], tf.int64), *shards.specs)
    assert said == []
