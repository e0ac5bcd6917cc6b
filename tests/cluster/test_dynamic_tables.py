"""Dynamic tables on real servers: no id is lost or doubled, whoever brings it, and rows fit any number of servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kdist
from kdist.hooks import CheckpointSaver
from kdist.layers import DynamicEmbedding, Eviction
from kdist.layers.initial_rows import RowInitializer
from kdist.strategies.sweeper import Sweeper

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

DIM, TABLES = 4, 3
SEEDS = [11, 12, 13]


def build(optimizer: Callable[[], keras.optimizers.Optimizer], **options: Any) -> keras.Model:
    """Two tables share an index, one is of strings, too."""
    ids, words = layers.Input((2,), dtype="int64", name="ids"), layers.Input((2,), dtype="string", name="words")
    inputs = [ids[:, 0], ids[:, 1], words]
    vectors = []
    for seed, of_table in zip(SEEDS, inputs):
        initializer = keras.initializers.RandomUniform(seed=seed)
        kind = "string" if of_table is words else "int64"
        layer = DynamicEmbedding(DIM, kind, initializer, combiner="sum", name=f"table_{seed}", **options)
        vectors.append(layer(of_table if of_table is words else of_table[:, None]))
    out = layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(5), name="out")
    model = keras.Model([ids, words], out(layers.Concatenate()(vectors)))
    model.compile(optimizer(), "mse")
    return model


def data(num_ids: int = 40) -> tuple[list[Any], np.ndarray]:
    rng = np.random.default_rng(8)
    numbers = rng.integers(0, num_ids, (64, 4))
    words = np.array([f"word {n}" for n in range(num_ids)], object)
    ids = numbers[:, :2] * (2**62 // num_ids) * [1, -1]
    return [ids, tf.constant(words[numbers[:, 2:]])], rng.normal(size=(64, 1)).astype(np.float32)


def rows_of(model: keras.Model) -> list[np.ndarray]:
    of_layers = [model.get_layer(f"table_{seed}") for seed in SEEDS]
    return [array for layer in of_layers for array in (layer.ids, layer.rows)]


@pytest.mark.long
def test_synchronous_training_has_the_same_rows_on_any_number_of_servers(run_dir: Path) -> None:
    def train(cluster: str, steps: int, folder: Path, **options: Any) -> kdist.Trainer:
        trainer = kdist.Trainer(
            lambda: build(lambda: keras.optimizers.Adagrad(0.1)),
            cluster,
            "sync_replicas" if "w" in cluster else "auto",
            run_dir=folder,
            hooks=[CheckpointSaver(every_steps=4, **options)],
            steps_per_call=4,
        )
        batch_size = 8 if "2w" in cluster else 16
        history = trainer.fit(
            *data(), batch_size=batch_size, steps=steps, shuffle=False, verbose=0, validation_data=data()
        )
        validated = history.history["val_loss"][-1]
        assert validated == pytest.approx(trainer.model.evaluate(*data(), verbose=0), rel=1e-5)
        return trainer

    train("2ps2w", 8, run_dir, background=True)
    train("3ps1w", 12, run_dir)
    resumed = train("local", 16, run_dir)
    expected = train("local", 16, run_dir.with_name("expected"))
    for ours, theirs in zip(rows_of(resumed.model), rows_of(expected.model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "ckpt-12"))
    for index, seed in enumerate(SEEDS):
        ids = reader.get_tensor(f"parameters/table_{seed}/embeddings_ids")
        np.testing.assert_array_equal(np.sort(ids), rows_of(expected.model)[2 * index])


def collisions(context: kdist.DataContext) -> tf.data.Dataset:
    """Batches of new ids, the same ones for every worker at about the same time."""
    batches = tf.data.Dataset.range(10**6).map(lambda n: tf.range(n * 16, n * 16 + 16))
    return batches.map(lambda ids: (ids[:, None], tf.zeros([16, 1])))


class Sum(keras.Model):
    """Its loss is the sum of all vectors of a batch, so that each update takes the same from a row."""

    def __init__(self) -> None:
        super().__init__()
        uniform = keras.initializers.RandomUniform(seed=7)
        self.table = DynamicEmbedding(DIM, embeddings_initializer=uniform, name="table")

    def call(self, ids: Any) -> Any:
        return keras.ops.sum(self.table(ids), (1, 2))[:, None]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parameter_server", "sync_replicas"])
def test_workers_that_bring_the_same_new_ids_give_each_one_row_and_lose_no_update(strategy: str, run_dir: Path) -> None:
    def make() -> keras.Model:
        model = Sum()
        model.compile(keras.optimizers.SGD(0.5), loss=lambda y, y_pred: keras.ops.sum(y_pred) / 8.0)
        return model

    steps = 300 if strategy == "parameter_server" else 200
    kdist.Trainer(make, "2ps3w", strategy, run_dir=run_dir, steps_per_call=8).fit(collisions, steps=steps, verbose=0)
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / f"ckpt-{steps}"))
    ids = reader.get_tensor("parameters/table/embeddings_ids")
    counts = reader.get_tensor("state/table/embeddings_counts")
    assert len(np.unique(ids)) == len(ids)
    assert counts.sum() == steps * 16
    if strategy == "sync_replicas":
        # In each step all workers bring the same new ids at once.
        assert sorted(ids) == list(range(steps * 16))
    drawn = RowInitializer(keras.initializers.RandomUniform(seed=7)).rows(
        tf.fill([len(ids)], tf.constant(7, tf.int64)), tf.constant(ids), DIM, tf.float32
    )
    expected = drawn.numpy() - 0.5 * counts[:, None] / 8
    np.testing.assert_allclose(reader.get_tensor("parameters/table/embeddings"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_servers_evict_while_workers_train(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweeper, "pause_secs", 0.05)

    def endless(context: kdist.DataContext) -> tf.data.Dataset:
        numbers = (
            tf.data.Dataset.random(seed=context.worker_index).batch(32).map(lambda n: tf.reshape(n % 5000, [8, 4]))
        )
        return numbers.map(lambda n: ((n[:, :2], tf.strings.as_string(n[:, 2:])), tf.zeros([8, 1])))

    trainer = kdist.Trainer(
        lambda: build(lambda: keras.optimizers.Adagrad(0.1), eviction=Eviction(max_rows=200)),
        "2ps2w",
        run_dir=run_dir,
        hooks=[CheckpointSaver(every_steps=200)],
    )
    with trainer.session(endless, steps=400) as session:
        while not session.should_stop():
            session.run()
            time.sleep(0.01)
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "ckpt-400"))
    for seed in SEEDS:
        ids = reader.get_tensor(f"parameters/table_{seed}/embeddings_ids")
        assert 150 < len(np.unique(ids)) == len(ids) <= 200
        # Most of those that are left came lately: without eviction, the first 200 ids would have stayed.
        assert np.median(reader.get_tensor(f"state/table_{seed}/embeddings_last_steps")) > 200


@pytest.mark.long
def test_rows_that_became_too_large_stay_on_the_servers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make(cluster: str, **options: Any) -> kdist.Trainer:
        return kdist.Trainer(lambda: build(lambda: keras.optimizers.Adagrad(0.1)), cluster, run_dir=run_dir, **options)

    # Without rows, the model is smaller.
    trainer = make("2ps1w", export_max_bytes=1000)
    history = trainer.fit(*data(), batch_size=16, steps=8, verbose=2, shuffle=False, validation_data=data())
    assert "more than run.export_max_bytes" in capsys.readouterr().out
    assert not (run_dir / "model.keras").exists()
    with pytest.raises(kdist.ConfigError, match="table_11 are on the parameter servers and in checkpoints"):
        trainer.model(list(map(tf.constant, data()[0])))
    with pytest.raises(kdist.ConfigError, match="more than export_max_bytes=1000, so its trained values are in"):
        trainer.evaluate(*data())
    x, y = data()
    on_workers = trainer.evaluate([x[0], x[1].numpy()], y, on_workers=True, return_dict=True)
    assert on_workers["loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-5)
    trainer.fit(*data(), batch_size=16, steps=12, verbose=0, shuffle=False)
    brought = make("1ps1w")
    brought.fit(*data(), batch_size=16, steps=16, verbose=0, shuffle=False)
    expected = kdist.Trainer(
        lambda: build(lambda: keras.optimizers.Adagrad(0.1)), run_dir=run_dir.with_name("expected")
    )
    expected.fit(*data(), batch_size=16, steps=16, verbose=0, shuffle=False)
    for ours, theirs in zip(rows_of(brought.model), rows_of(expected.model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_model_with_rows_is_trained_from_them_on_servers(run_dir: Path) -> None:
    model = build(lambda: keras.optimizers.SGD(0.0))
    rows = np.random.default_rng(0).normal(size=(50, DIM)).astype(np.float32)
    model.get_layer("table_12").set_rows(np.arange(50) * 7919, rows)
    kdist.Trainer(model, "2ps1w", run_dir=run_dir).fit(*data(), batch_size=16, steps=4, verbose=0)
    layer = model.get_layer("table_12")
    assert len(layer.ids) > 50
    np.testing.assert_array_equal(layer.rows[np.isin(layer.ids, np.arange(50) * 7919)], rows)
