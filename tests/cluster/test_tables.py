"""Many tables on real servers: synchronous training has the numbers of one process, and checkpoints fit elsewhere."""

from __future__ import annotations

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

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

ROWS, DIM, TABLES = 24, 4, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    """Two batches together have each row of each table once, so that Keras updates the same rows."""
    rng = np.random.default_rng(8)
    x = np.concatenate([np.stack([rng.permutation(ROWS) for _ in range(TABLES)], 1) for _ in range(4)])
    return x.astype(np.int64), rng.normal(size=(len(x), 1)).astype(np.float32)


def build(embedding: type[layers.Embedding], optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(6)
    ids = layers.Input((TABLES,), dtype="int64")
    parts = [embedding(ROWS, DIM, name=f"table_{i}")(ids[:, i]) for i in range(TABLES)]
    model = keras.Model(ids, layers.Dense(1, name="out")(layers.Concatenate()(parts)))
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.SGD(0.5, clipnorm=0.1), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Adagrad(0.1), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Adam(0.01), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Ftrl(0.1), marks=pytest.mark.long),
    ],
    ids=["sgd", "adagrad", "adam", "ftrl"],
)
def test_synchronous_replicas_train_as_one_process_of_keras(
    optimizer: Callable[[], keras.optimizers.Optimizer], run_dir: Path
) -> None:
    expected = build(layers.Embedding, optimizer())
    expected.fit(*data(), batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    trainer = kdist.Trainer(
        lambda: build(kdist.layers.Embedding, optimizer()), "2ps2w", "sync_replicas", run_dir=run_dir, steps_per_call=4
    )
    trainer.fit(*data(), batch_size=ROWS // 2, steps=8, shuffle=False, verbose=0)
    for ours, theirs in zip(trainer.model.trainable_variables, expected.trainable_variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=theirs.path)


@pytest.mark.long
def test_training_goes_on_with_other_servers_and_workers_validate_by_rows(run_dir: Path) -> None:
    def train(cluster: str, steps: int) -> tuple[kdist.Trainer, list[np.ndarray]]:
        trainer = kdist.Trainer(
            lambda: build(kdist.layers.Embedding, keras.optimizers.Adam(0.01)),
            cluster,
            "sync_replicas" if "w" in cluster else "auto",
            run_dir=run_dir,
            hooks=[CheckpointSaver(every_steps=4)],
            seed=1,
        )
        history = trainer.fit(*data(), batch_size=ROWS, steps=steps, shuffle=False, verbose=0, validation_data=data())
        validated = history.history["val_loss"][-1]
        assert validated == pytest.approx(trainer.model.evaluate(*data(), verbose=0), rel=1e-5)
        return trainer, trainer.model.get_weights()

    train("2ps1w", 4)
    _, resumed = train("3ps1w", 8)
    expected = build(layers.Embedding, keras.optimizers.Adam(0.01))
    expected.fit(*data(), batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    for ours, theirs in zip(resumed, expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_wrong_id_is_named_with_its_own_table(run_dir: Path) -> None:
    x, y = data()
    x[5, 1] = ROWS
    trainer = kdist.Trainer(lambda: build(kdist.layers.Embedding, keras.optimizers.SGD(0.1)), "2ps1w", run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=rf"id {ROWS} is not in table table_1/embeddings, .* 0 to {ROWS - 1}$"):
        trainer.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)


class Pooled(keras.Model):
    """Two features share a table; the ids of one are ragged, those of the other sparse and weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.table = kdist.layers.Embedding(ROWS, DIM, combiner="mean", name="shared")
        self.out = layers.Dense(1, name="out")

    def call(self, x: Any) -> Any:
        return self.out(self.table(x["ragged"]) + self.table(x["sparse"], x["weights"]))


def pooled_data(context: kdist.DataContext | None = None) -> tf.data.Dataset:
    """Batches of 8 examples, the same for every worker; some examples have no ids."""
    rng = np.random.default_rng(5)
    lengths, labels = rng.integers(0, 5, 32), rng.normal(size=(32, 1)).astype(np.float32)
    ids = tf.RaggedTensor.from_row_lengths(rng.integers(0, ROWS, lengths.sum()), lengths)
    weights = ids.with_flat_values(rng.uniform(1, 2, lengths.sum()).astype(np.float32))
    batches = tf.data.Dataset.from_tensor_slices((ids, weights, labels)).batch(8)
    return batches.map(
        lambda ids, weights, labels: (
            {"ragged": ids, "sparse": ids.to_sparse(), "weights": weights.to_sparse()},
            labels,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("is_function", [False, True])
def test_ragged_and_sparse_ids_train_and_validate_as_in_keras(is_function: bool, run_dir: Path) -> None:
    def build_pooled() -> keras.Model:
        keras.utils.set_random_seed(6)
        model = Pooled()
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    expected = build_pooled()
    expected.fit(pooled_data(), epochs=2, verbose=0)
    trainer = kdist.Trainer(build_pooled, "2ps1w", run_dir=run_dir)
    data = pooled_data if is_function else pooled_data()
    history = trainer.fit(data, steps=8, verbose=0, validation_data=pooled_data())
    for ours, theirs in zip(trainer.model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert history.history["val_loss"][-1] == pytest.approx(expected.evaluate(pooled_data(), verbose=0), rel=1e-5)
    assert "shared/embeddings: looked up by rows" in (run_dir / "placement.txt").read_text()
    outputs = trainer.predict(pooled_data(), verbose=0)
    np.testing.assert_allclose(outputs, expected.predict(pooled_data(), verbose=0), rtol=1e-5, atol=1e-6)
