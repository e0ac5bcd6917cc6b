"""Whatever an element of the data is, a model's own steps get it as Keras passes it, and come to the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, toy_data

import kdist

X = toy_data(64)[0]
Y = X.sum(1)


class Example(NamedTuple):
    x: Any
    y: Any


class Sees(keras.Model):
    """Trains on the first tensor of an element, and keeps the structure of all elements that its steps get."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(6, kernel_initializer=keras.initializers.GlorotUniform(1))
        vars(self)["seen"] = set()

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        self.seen.add(str(tf.nest.map_structure(tf.type_spec_from_value, data)))
        first = tf.nest.flatten(data)[0]
        if isinstance(first, tf.SparseTensor):
            first = tf.sparse.to_dense(first)
        elif isinstance(first, tf.RaggedTensor):
            first = first.to_tensor()
        x = tf.ensure_shape(first, [None, 6])
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - x))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        self.seen.add(f"to test {tf.nest.map_structure(tf.type_spec_from_value, data)}")
        return {"loss": tf.constant(0.0)}


def sees() -> keras.Model:
    model = Sees()
    model.compile("sgd")
    return model


def batches(elements: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(elements).batch(8)


class Made(keras.utils.PyDataset):
    """Batches of what `make` makes of some rows."""

    def __init__(self, make: Callable[[slice], Any]) -> None:
        super().__init__()
        self._make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        return self._make(slice(8 * number, 8 * number + 8))


ELEMENTS: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: batches(X),
    "a dict": lambda: batches({"a": X, "b": X}),
    "x in a tuple": lambda: batches((X,)),
    "x in two tuples": lambda: batches(((X,),)),
    "two inputs": lambda: batches(((X, X),)),
    "a named tuple": lambda: batches(Example(X, Y)),
    "four parts": lambda: batches((X, Y, Y, X)),
    "nested dicts": lambda: batches(({"a": X}, {"label": Y})),
    "ragged": lambda: batches(tf.RaggedTensor.from_tensor(X)),
    "ragged and labels": lambda: batches((tf.RaggedTensor.from_tensor(X), Y)),
    "sparse": lambda: batches(tf.sparse.from_dense(X)),
    "an array": lambda: X,
    "a dict of arrays": lambda: {"a": X, "b": X},
    "a list of arrays": lambda: [X, X],
    "an array that Python makes": lambda: Made(lambda rows: X[rows]),
    "a dict that Python makes": lambda: Made(lambda rows: {"a": X[rows]}),
    "a tuple that Python makes": lambda: Made(lambda rows: (X[rows],)),
}


def assert_as_keras(make: Callable[[], Any], cluster: str, run_dir: Path) -> None:
    in_batches = isinstance(make(), (tf.data.Dataset, keras.utils.PyDataset))
    arguments: dict[str, Any] = {"batch_size": None if in_batches else 8, "shuffle": False, "verbose": 0}
    plain, trainer = sees(), kdist.Trainer(sees, cluster, run_dir=run_dir)
    for fit in (plain.fit, trainer.fit):
        fit(make(), validation_data=make(), **arguments)
    assert trainer.model.seen == plain.seen
    for ours, theirs in zip(trainer.model.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


IN_SHORT = {"a named tuple", "ragged and labels", "a dict of arrays"}


@pytest.mark.parametrize("name", in_short(ELEMENTS, {*IN_SHORT, "a tuple that Python makes"}))
def test_own_steps_get_the_element_as_it_is(name: str, tmp_path: Path) -> None:
    assert_as_keras(ELEMENTS[name], "local", tmp_path / "run")


@pytest.mark.parametrize("name", in_short(["a tensor", "a dict", "sparse"], {"a dict"}))
def test_workers_pass_it_on(name: str, tmp_path: Path) -> None:
    assert_as_keras(ELEMENTS[name], "1ps1w", tmp_path / "run")


class Restores(keras.Model):
    """Has no labels: its loss compares outputs with inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(6, kernel_initializer=keras.initializers.GlorotUniform(1))

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        assert y is None
        return keras.ops.mean(keras.ops.square(y_pred - x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: batches(X),
        pytest.param(lambda: batches((X,)), marks=pytest.mark.long),
        pytest.param(lambda: X, marks=pytest.mark.long),
    ],
)
def test_a_model_whose_loss_needs_no_labels_trains_as_with_keras(make: Callable[[], Any], tmp_path: Path) -> None:
    def build() -> keras.Model:
        model = Restores()
        model.compile("sgd")
        return model

    plain, trainer = build(), kdist.Trainer(build, "local", run_dir=tmp_path / "run")
    history = [fit(make(), shuffle=False, verbose=0).history["loss"] for fit in (plain.fit, trainer.fit)]
    np.testing.assert_allclose(*history, rtol=1e-5)
