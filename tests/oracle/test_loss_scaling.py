"""Loss scaling as by Keras: the same scale, the same dropped steps, the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, toy_data
from test_keras_parity import assert_same_as_keras

import kdist

BATCH, STEPS = 16, 8


@pytest.fixture(autouse=True)
def mixed_float16() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def scaled(initial_scale: float = 2.0**20, kind: type[keras.Model] = keras.Sequential) -> keras.Model:
    """Its gradients overflow with the initial scale, and again whenever it has grown twice."""
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)
    inputs = keras.layers.Input((6,))
    outputs = keras.layers.Dense(3, activation="softmax", dtype="float32")(keras.layers.Dense(8)(inputs))
    model = keras.Model(inputs, outputs) if kind is keras.Sequential else kind(inputs, outputs)
    scaling = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale, dynamic_growth_steps=2)
    model.compile(scaling, "sparse_categorical_crossentropy", auto_scale_loss=False, jit_compile=False)
    return model


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=keras.ops.shape(x)[0])
        return self.get_metrics_result()


class Twice(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        for _ in range(2):
            logs = OwnStep.train_step(self, data)
        return logs


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize("kind", in_short([keras.Sequential, OwnStep], {OwnStep}))
@pytest.mark.parametrize(
    "cluster", [pytest.param("local", marks=pytest.mark.long), pytest.param("2ps1w", marks=pytest.mark.cluster)]
)
@pytest.mark.usefixtures("tasks_prepared")
def test_scale_and_dropped_steps_are_those_of_keras(cluster: str, kind: type[keras.Model], run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    model = assert_same_as_keras(
        lambda: scaled(kind=kind), x, y, run_dir, cluster, batch_size=BATCH, epochs=2, compare_iterations=False
    )
    found, updates = result(run_dir), int(model.optimizer.iterations)
    assert found["global_step"] == 2 * STEPS
    assert 1 < found["overflowed_steps"] == 2 * STEPS - updates
    assert found["metrics"]["train"].keys() == {"loss"}


def test_the_policy_alone_scales_the_loss_and_training_goes_on_from_the_model(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    for epochs in (5, 10):
        history = trainer.fit(x, y, batch_size=BATCH, initial_epoch=epochs - 5, epochs=epochs, verbose=0)
    assert history.history["loss"][-1] < 1.5
    assert isinstance(trainer.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert {v.dtype for v in trainer.model.trainable_variables} == {"float32"}
    assert keras.models.load_model(run_dir / "model.keras").optimizer.iterations == trainer.model.optimizer.iterations


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
def test_asynchronous_workers_find_a_scale_together(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    trainer = kdist.Trainer(lambda: scaled(2.0**24), cluster="2ps2w", run_dir=run_dir)
    trainer.fit(x, y, batch_size=BATCH, steps=40, verbose=0)
    found = result(run_dir)
    assert found["global_step"] == 40
    assert 1 < found["overflowed_steps"] == 40 - int(trainer.model.optimizer.iterations) < 40
    assert 0 < float(trainer.model.optimizer.dynamic_scale) < 2.0**24
    assert all(np.isfinite(weights).all() for weights in trainer.model.get_weights())
    # A resumed run knows what was dropped before.
    trainer = kdist.Trainer(lambda: scaled(2.0**24), cluster="2ps2w", run_dir=run_dir, resume="must")
    trainer.fit(x, y, batch_size=BATCH, steps=44, verbose=0)
    assert result(run_dir)["overflowed_steps"] == 44 - int(trainer.model.optimizer.iterations)


def test_what_cannot_scale_its_loss_is_refused(run_dir: Path) -> None:
    with pytest.raises(kdist.ConfigError, match=r"Twice.train_step .* calls optimizers several times, and scales"):
        kdist.Trainer(lambda: scaled(kind=Twice), run_dir=run_dir).fit(*toy_data(BATCH), steps=1, verbose=0)

    def two() -> keras.Model:
        model = scaled(kind=OwnStep)
        model.other = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        return model

    with pytest.raises(kdist.ConfigError, match="only the model's own optimizer"):
        kdist.Trainer(two, run_dir=run_dir).fit(*toy_data(BATCH), steps=1, verbose=0)
