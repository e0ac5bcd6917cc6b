"""Incremental checkpoints on real servers: a chain is resumed on other servers, and hooks get its deltas."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kdist
from kdist.hooks import CheckpointSaver
from kdist.layers import DynamicEmbedding, Embedding, Eviction
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.sweeper import Sweeper

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

ROWS, DIM = 1000, 4


def build() -> keras.Model:
    ids = layers.Input((2,), dtype="int64")
    initializer = keras.initializers.RandomUniform(seed=3)
    fixed = Embedding(ROWS, DIM, initializer, name="fixed")(ids[:, 0])
    rows = DynamicEmbedding(DIM, "int64", initializer, eviction=Eviction(unseen_steps=30), name="open")(ids[:, 1])
    kernel = keras.initializers.GlorotUniform(5)
    model = keras.Model(ids, layers.Dense(1, kernel_initializer=kernel)(layers.Concatenate()([fixed, rows])))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def data(context: kdist.DataContext) -> tf.data.Dataset:
    """Ids that come for a while and then no more."""
    numbers = tf.data.Dataset.range(10**6).map(lambda n: n * 2 % ROWS + tf.range(8, dtype=tf.int64) % 4)
    return numbers.map(lambda ids: (tf.stack([ids % ROWS, ids], 1), tf.ones([8, 1])))


class Serving(kdist.hooks.Hook):
    """A serving system that gets deltas, and copies the checkpoints that are there with them."""

    def __init__(self, copies: Path) -> None:
        self.rows: dict[str, int] = {}
        self._copies = copies

    def after_delta(self, path: Path) -> None:
        delta = tf.train.load_checkpoint(str(path))
        self.rows[path.name] = len(delta.get_tensor("delta/ids/fixed/embeddings"))
        shutil.copytree(path.parent, self._copies / path.name / "checkpoints")


def ordered(values: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    assert values is not None
    order = np.argsort(values["parameters/open/embeddings_ids"])
    return {name: value[order] if "/open/" in name else value for name, value in values.items()}


def assert_same_bits(ours: dict[str, np.ndarray] | None, theirs: dict[str, np.ndarray] | None) -> None:
    ours, theirs = ordered(ours), ordered(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "background", "other"), [("sync_replicas", False, "local"), ("parameter_server", True, "3ps1w")]
)
def test_a_chain_has_the_bits_of_a_full_checkpoint_and_is_resumed_on_other_servers(
    strategy: str, background: bool, other: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweeper, "pause_secs", 0.05)
    copies = run_dir.with_name("copies")
    serving = Serving(copies)
    saver = CheckpointSaver(every_steps=20, full_every=4, keep=2, background=background)
    trainer = kdist.Trainer(build, "2ps2w", strategy, run_dir=run_dir, hooks=[saver, serving], steps_per_call=5)
    trainer.fit(data, steps=100, verbose=0)
    # The last one is full, and takes the place of the delta of its step.
    assert {path.stem for path in run_dir.glob("checkpoints/*.index")} == {"ckpt-80", "ckpt-100"}
    assert set(serving.rows) == {"delta-20", "delta-40", "delta-60", "delta-100"}
    # Those of 20 steps, of 1000 in all.
    assert all(0 < rows < 100 for rows in serving.rows.values())
    full = Checkpoints(run_dir / "checkpoints").read(100)
    assert full is not None
    assert len(full["parameters/open/embeddings_ids"]) < 180
    assert_same_bits(Checkpoints(copies / "delta-100" / "checkpoints").read(100), full)
    resumed = kdist.Trainer(build, other, run_dir=copies / "delta-60", hooks=[])
    with resumed.session(data, steps=61) as session:
        assert session.global_step == 60
        assert_same_bits(session.read(), Checkpoints(copies / "delta-60" / "checkpoints").read(60))
