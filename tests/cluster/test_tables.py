"""Many tables on real servers: synchronous training has the numbers of one process, and checkpoints fit elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
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
        lambda: keras.optimizers.SGD(0.5, clipnorm=0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.Ftrl(0.1),
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


def test_a_wrong_id_is_named_with_its_own_table(run_dir: Path) -> None:
    x, y = data()
    x[5, 1] = ROWS
    trainer = kdist.Trainer(lambda: build(kdist.layers.Embedding, keras.optimizers.SGD(0.1)), "2ps1w", run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=rf"id {ROWS} is not in table table_1/embeddings, .* 0 to {ROWS - 1}$"):
        trainer.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
