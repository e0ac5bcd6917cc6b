"""Models whose class has a `fit`, `evaluate` or `predict` of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short

import kdist
from kdist.errors import ConfigError
from kdist.evaluation.on_workers import can_evaluate, can_predict
from kdist.model.source import preprocessing_of

WORDS = ["low", "high", "very", "much"] * 12
Y = np.arange(48) % 4 / 4
TABLE = ["low", "high", "very", "much"]


class Task(keras.Sequential):
    """Turns words into numbers in its own `fit`, `evaluate` and `predict`, as the tasks of KerasHub do."""

    def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
        numbers = tf.argmax(tf.equal(tf.expand_dims(x, -1), TABLE), -1)
        return keras.utils.pack_x_y_sample_weight(tf.one_hot(numbers, 4), y, sample_weight)

    def _prepared(self, x: Any, y: Any = None, sample_weight: Any = None, batch_size: int | None = None) -> Any:
        if not isinstance(x, tf.data.Dataset):
            data = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
            x = tf.data.Dataset.from_tensor_slices(data).batch(batch_size or 32)
        return x.map(self.preprocess_samples)

    def fit(self, x: Any = None, y: Any = None, batch_size: Any = None, sample_weight: Any = None, **more: Any) -> Any:
        return super().fit(self._prepared(x, y, sample_weight, batch_size), **more)

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: Any = None, sample_weight: Any = None, **more: Any
    ) -> Any:
        return super().evaluate(self._prepared(x, y, sample_weight, batch_size), **more)

    def predict(self, x: Any, batch_size: Any = None, **more: Any) -> Any:
        return super().predict(self._prepared(x, batch_size=batch_size), **more)


def build(kind: type[keras.Sequential] = Task) -> Any:
    keras.utils.set_random_seed(1)
    model = kind([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((WORDS, Y)).batch(8)


@pytest.mark.parametrize("kind", in_short(["list", "array", "dataset", "function"], {"function"}))
def test_the_preprocessing_of_a_model_is_applied_as_its_own_fit_does(run_dir: Path, kind: str) -> None:
    plain = build()
    plain.fit(batches(), epochs=2, verbose=0)
    data: tuple[Any, ...] = {
        "list": (WORDS, Y),
        "array": (np.array(WORDS), Y),
        "dataset": (batches(),),
        "function": (lambda context: batches(),),
    }[kind]
    trainer = kdist.Trainer(build, run_dir=run_dir)
    size = 8 if len(data) == 2 else None
    history = trainer.fit(*data, batch_size=size, steps=12, validation_data=(np.array(WORDS), Y), verbose=0)
    for found, expected in zip(trainer.model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    loss = plain.evaluate(batches(), verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert trainer.evaluate(WORDS, Y) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(trainer.predict(np.array(WORDS)), plain.predict(batches(), verbose=0), rtol=1e-5)


def test_data_that_only_the_model_could_prepare_is_refused(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"x is a generator, and the model prepares its data itself"):
        kdist.Trainer(build, run_dir=run_dir).fit((item for item in batches()), steps=2, verbose=0)


def test_a_fit_that_would_not_be_called_is_refused() -> None:
    class Scaled(keras.Sequential):
        def fit(self, x: Any, y: Any, **arguments: Any) -> Any:
            return super().fit(x * 10, y, **arguments)

    class OfATask(Task):
        def fit(self, *data: Any, **arguments: Any) -> Any:
            return super().fit(*data, **arguments)

    class Loop(keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            return super().make_train_function(force)

    for kind in (Scaled, OfATask, Loop):
        with pytest.raises(ConfigError, match=rf"class {kind.__name__} has a `fit` or `make_train_function` of"):
            kdist.Trainer(build(kind))


def test_workers_leave_an_evaluation_of_its_own_to_the_model() -> None:
    class Own(keras.Sequential):
        def evaluate(self, *data: Any, **arguments: Any) -> Any:
            return super().evaluate(*data, **arguments)

        def predict(self, *data: Any, **arguments: Any) -> Any:
            return super().predict(*data, **arguments)

    x = np.eye(4, dtype=np.float32)
    models = {kind: build(kind) for kind in (keras.Sequential, Own, Task)}
    for model in models.values():
        keras.Model.evaluate(model, x, x[:, :1], verbose=0)
    assert [can_evaluate(model) for model in models.values()] == [True, False, True]
    assert [can_predict(model) for model in models.values()] == [True, False, False]
    assert [preprocessing_of(model) is not None for model in models.values()] == [False, False, True]
