"""Compares kdist with TF1's own SyncReplicasOptimizer and hooks."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import result_of, toy_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tf1_program import run_tf1

import kdist
from kdist.run.checkpoint import Checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

LAST_STEP, BATCH, WORKERS = 31, 16, 2
OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "ftrl": keras.optimizers.Ftrl,
}


def build(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [pytest.param(n, marks=[pytest.mark.long] * (n == "ftrl")) for n in OPTIMIZERS])
def test_strict_sync_is_that_of_tf1_and_so_are_the_hooks(optimizer: str, tmp_path: Path) -> None:
    x, y = toy_data(256)
    learning_rate = 0.1
    w1, b1, w2, b2 = build(OPTIMIZERS[optimizer](learning_rate)).get_weights()
    np.savez(tmp_path / "arrays.npz", w1=w1, b1=b1, w2=w2, b2=b2, x=x, y=y)
    spec = {
        "arrays": str(tmp_path / "arrays.npz"),
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "num_workers": WORKERS,
        "batch_size": BATCH,
        "last_step": LAST_STEP,
        "save_steps": 10,
        "summary_steps": 10,
    }
    expected = run_tf1(spec, tmp_path / "tf1")

    trainer = kdist.Trainer(
        lambda: build(OPTIMIZERS[optimizer](learning_rate)),
        cluster=f"1ps{WORKERS}w",
        strategy="sync_replicas",
        run_dir=tmp_path / "run",
        hooks=[
            kdist.hooks.StopAtStep(last_step=LAST_STEP),
            kdist.hooks.CheckpointSaver(every_steps=10, keep=1000),
            kdist.hooks.SummarySaver(every_steps=10),
        ],
    )
    trainer.fit(x, y, batch_size=BATCH, steps=10 * LAST_STEP, shuffle=False, verbose=0)

    result = result_of(tmp_path / "run")
    assert result["global_step"] == expected["global_step"] == LAST_STEP
    assert result["gradients"]["applied"] == expected["num_updates"]
    for ours, name in zip(trainer.model.get_weights(), ("w1", "b1", "w2", "b2")):
        np.testing.assert_allclose(ours, expected["parameters"][name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == expected["checkpoint_steps"]
    events = EventAccumulator(str(tmp_path / "run" / "tb" / "train")).Reload()
    assert [event.step for event in events.Tensors("loss")] == expected["summary_steps"]
    reader = tf.train.load_checkpoint(str(tmp_path / "run" / "checkpoints" / f"ckpt-{LAST_STEP}"))
    assert reader.get_tensor("global_step") == LAST_STEP
