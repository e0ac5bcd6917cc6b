"""The data and models that `fit` takes, which are those that `keras.Model.fit` takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, skip_before_keras_3_13

import kdist

ROWS = [[1, 2, 3], [4], [5, 6], [1, 5], [2], [3, 4, 6], [5], [6, 1]]
Y = np.arange(8, dtype=np.float32)[:, None]
X = np.random.default_rng(3).normal(size=(8, 3)).astype(np.float32)


class Summed(keras.Model):
    """Of ragged rows, and of an input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            inputs, optional = inputs["x"], inputs["optional"]
            return self.dense(inputs if optional is None else inputs + optional)
        return self.dense(tf.reduce_sum(tf.cast(inputs, tf.float32), 1)[:, tf.newaxis])


def summed() -> keras.Model:
    keras.utils.set_random_seed(4)
    model = Summed()
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def linear() -> keras.Model:
    keras.utils.set_random_seed(4)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


def frozen() -> keras.Model:
    model = linear()
    model.trainable = False
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def batches() -> Any:
    while True:
        yield {"x": X[:4], "optional": None}, Y[:4]


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], dict[str, Any]]]] = {
    "ragged": (summed, lambda: {"x": tf.ragged.constant(ROWS), "y": Y}),
    "None": (summed, lambda: {"x": {"x": X, "optional": None}, "y": Y}),
    "None from a generator": (summed, lambda: {"x": batches(), "steps_per_epoch": 2}),
    "no trainable weights": (frozen, lambda: {"x": X, "y": Y}),
}


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("name", in_short(CASES, {"ragged", "None"}))
def test_it_trains_as_in_keras(name: str, run_dir: Path) -> None:
    if name.startswith("None"):
        skip_before_keras_3_13()
    build, data = CASES[name]
    given: dict[str, Any] = {"epochs": 2, "verbose": 0, "shuffle": False}
    if not name.endswith("generator"):
        given["batch_size"] = 4
    model, trainer = build(), kdist.Trainer(build, run_dir=run_dir)
    expected = model.fit(**data(), **given).history
    found = trainer.fit(**data(), **given).history
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5)
    for ours, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize("cluster", ["local", pytest.param("2w", marks=[pytest.mark.cluster, pytest.mark.long])])
def test_a_stage_without_epochs_trains_nothing(cluster: str, run_dir: Path) -> None:
    # A program that trains in stages, of which one is empty, or has been done before.
    def stages(fit: Callable[..., Any]) -> tuple[list[str], list[list[int]]]:
        seen: list[str] = []
        told = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: seen.append("begin"),
            on_epoch_end=lambda epoch, logs: seen.append(f"epoch {epoch}"),
            on_train_end=lambda logs: seen.append("end"),
        )
        given = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [told]}
        stages = [{"epochs": 0}, {"epochs": 1}, {"initial_epoch": 1, "epochs": 1}, {"initial_epoch": 1, "epochs": 2}]
        return seen, [fit(X, Y, **given, **stage).epoch for stage in stages]

    def build() -> keras.Model:
        model = linear()
        model.compile("sgd", "mse")
        return model

    trainer = kdist.Trainer(build, cluster=cluster, run_dir=run_dir)
    assert stages(trainer.fit) == stages(build().fit)
    assert trainer.result.status == "done"


def test_a_model_that_is_not_compiled_predicts_and_is_trained_once_it_is_compiled(run_dir: Path) -> None:
    trainer = kdist.Trainer(linear, run_dir=run_dir)
    np.testing.assert_allclose(trainer.predict(X, verbose=0), linear().predict(X, verbose=0), rtol=1e-6)
    with pytest.raises(kdist.ConfigError, match="is not compiled"):
        trainer.fit(X, Y, verbose=0)
    trainer.model.compile("sgd", "mse")
    assert len(trainer.fit(X, Y, verbose=0).history["loss"]) == 1
