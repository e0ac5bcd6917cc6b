"""Checkpoints and deltas that kdist 0.1.0 has written are restored, on any number of servers.

`checkpoints_0_1_0/` has two folders of checkpoints, which two parameter servers have written, in slices of 1 kB: of a
model with tables, a full checkpoint and two deltas, and of one without, a full checkpoint. Beside them are the values
that they stand for, as `values.npz`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import kdist
from kdist.config.schema import ServerOptions
from kdist.hooks import CheckpointSaver
from kdist.layers import DynamicEmbedding, Embedding, Eviction
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.store import ParameterStore
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.prepared_training import prepare

SAVED = Path(__file__).with_name("checkpoints_0_1_0")
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
BATCH, DIM = 8, 4


def with_tables() -> keras.Model:
    """Two tables with a length, in one group, two without, a layer that is split by rows, and one with state."""
    keras.utils.set_random_seed(1)
    inputs = layers.Input((4,), dtype="int64")
    vectors = [Embedding(101 + n, DIM, name=f"fixed_{n}")(inputs[:, n]) for n in range(2)]
    for n in range(2):
        initializer = keras.initializers.RandomUniform(seed=n)
        vectors.append(
            DynamicEmbedding(DIM, "int64", initializer, eviction=Eviction(unseen_steps=3), name=f"open_{n}")(
                inputs[:, 2 + n]
            )
        )
    hidden = layers.Dense(24, name="hidden")(layers.Concatenate()(vectors))
    model = keras.Model(inputs, layers.Dense(1, name="out")(layers.BatchNormalization(name="norm")(hidden)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def without() -> keras.Model:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([layers.Input((4,)), layers.Dense(9, name="hidden"), layers.Dense(1, name="out")])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    return model


def store_of(build: Callable[[], keras.Model], num_servers: int, folder: Path) -> ParameterStore:
    trainer = kdist.Trainer(build, run_dir=folder, seed=3, hooks=[CheckpointSaver(full_every=9)])
    x, y = np.zeros((BATCH, 4), np.int64), np.zeros((BATCH, 1), np.float32)
    request = trainer._fit_of(x, y, batch_size=BATCH)
    prepared = prepare(request.training_spec(request.training_data), 1)
    options = ServerOptions(placement="partitioned", partition_min_bytes=512)
    return prepared.store([CPU] * num_servers, prepared.plan(num_servers, options))


def stored_by(store: ParameterStore) -> Any:
    """The values that `Checkpoints` restore."""
    return SimpleNamespace(shapes={**store.values.shapes, **store.dynamic.shapes}, restore=store.restore)


def values_of(store: ParameterStore) -> dict[str, np.ndarray]:
    portions = [*store.values.portions(), *store.dynamic.read()]
    return in_order({name: value for portion in portions for name, value in portion.items()})


def in_order(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of tables without a length in the order of their ids."""
    found = dict(values)
    for name, ids in values.items():
        if name.endswith("/embeddings_ids"):
            table = name.removesuffix("_ids").removeprefix("parameters/")
            found |= {other: values[other][np.argsort(ids)] for other in values if f"/{table}" in other}
    return found


@pytest.mark.parametrize(
    ("step", "num_servers"),
    [(7, 1), *(pytest.param(*given, marks=pytest.mark.long) for given in [(2, 1), (2, 3), (7, 3)])],
)
def test_a_checkpoint_and_its_deltas_are_restored(
    step: int, num_servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", 1024)
    shutil.copytree(SAVED / "tables", tmp_path / "checkpoints")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [2, 4, 7]
    store = store_of(with_tables, num_servers, tmp_path)
    checkpoints.restore(stored_by(store), until=step)
    check(values_of(store), SAVED / "tables" / f"values-{step}.npz")
    read = checkpoints.read(step)
    assert read is not None
    check(in_order(read), SAVED / "tables" / f"values-{step}.npz")


@pytest.mark.parametrize("slice_bytes", [64, pytest.param(1 << 20, marks=pytest.mark.long)])
def test_a_checkpoint_without_tables_is_restored(
    slice_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", slice_bytes)
    shutil.copytree(SAVED / "dense", tmp_path / "checkpoints")
    store = store_of(without, 2, tmp_path)
    Checkpoints(tmp_path / "checkpoints").restore(stored_by(store))
    check(values_of(store), SAVED / "dense" / "values-3.npz")


def check(found: dict[str, np.ndarray], expected: Path) -> None:
    with np.load(expected) as values:
        assert found.keys() == set(values)
        for name, value in found.items():
            assert value.dtype == values[name].dtype
            np.testing.assert_array_equal(value, values[name], err_msg=name)
