"""One replica must compute exactly what `keras.Model.fit` computes: same batches, same parameters, same metrics.

`single` runs here in this process; `parameter_server` with one worker is as deterministic, and its parameters and slots
take the whole way over two servers and back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, toy_data

import kdist
from kdist._compat.keras import optimizers_of

BATCH, STEPS = 16, 12

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
}


ACCUMULATING: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "accumulating": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), gradient_accumulation_steps=5, clipnorm=0.1
    ),
    "accumulating with averages": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9
    ),
}
#: Accumulated gradients are those of `test_two_servers_do_keras_maths`.
_SHORT = {"adamw", "ema"}


def multi_data() -> tuple[Any, Any]:
    x, y = toy_data(BATCH * STEPS)
    return (
        {"numbers": x, "category": (np.arange(len(x)) % 5).astype(np.int32)[:, None]},
        {"label": y, "size": np.abs(x).sum(1, keepdims=True)},
    )


def list_data() -> tuple[Any, Any]:
    x, y = toy_data(BATCH * STEPS)
    return [x, -x], [y, np.abs(x).sum(1, keepdims=True)]


def tuple_data() -> tuple[Any, Any]:
    x, y = toy_data(BATCH * STEPS)
    return (x, x[::-1].copy()), y


MODELS: dict[str, tuple[Callable[[], keras.Model], Callable[[], tuple[Any, Any]]]] = {
    "batch_normalized": (models.batch_normalized, lambda: toy_data(BATCH * STEPS)),
    "two_inputs_two_outputs": (models.two_inputs_two_outputs, multi_data),
    "subclassed": (models.subclassed, tuple_data),
    "lists": (models.lists, list_data),
}


def assert_same_as_keras(
    build: Callable[[], keras.Model],
    x: Any,
    y: Any,
    run_dir: Path,
    cluster: str,
    compare_iterations: bool = True,
    batch_size: int = BATCH,
    **fit_arguments: Any,
) -> keras.Model:
    """Returns the model that kdist has trained."""
    fit_arguments |= {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(3)
    expected = build()
    expected_history = expected.fit(x, y, **fit_arguments)
    keras.utils.set_random_seed(3)
    trainer = kdist.Trainer(build, cluster=cluster, run_dir=run_dir)
    history = trainer.fit(x, y, **fit_arguments)

    for ours, theirs in zip(trainer.model.variables, expected.variables):
        if "seed" not in ours.name:
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-6, err_msg=theirs.path)
    optimizers = list(zip(optimizers_of(trainer.model).values(), optimizers_of(expected).values()))
    optimizers.append((trainer.model.optimizer, expected.optimizer))
    pairs = [pair for ours, theirs in optimizers for pair in zip(ours.variables, theirs.variables)]
    for ours, theirs in pairs:
        if theirs is expected.optimizer.iterations and not compare_iterations:
            continue
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-6, err_msg=theirs.path)
    assert set(history.history) == set(expected_history.history)
    for name, values in expected_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=2e-4, atol=2e-6, err_msg=name)
    assert history.epoch == expected_history.epoch
    return trainer.model


def with_optimizer_built(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """In `fit`, Keras builds it while a function is traced, and ScheduleFreeAdamW loses its initial values there."""
    model = models.mlp(optimizer)
    optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("name", in_short([*OPTIMIZERS, *ACCUMULATING], _SHORT))
def test_every_option_of_an_optimizer_does_keras_maths(name: str, run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    make = {**OPTIMIZERS, **ACCUMULATING}[name]
    assert_same_as_keras(lambda: with_optimizer_built(make()), x, y, run_dir, "local")


@pytest.mark.parametrize("name", in_short(MODELS, {"batch_normalized", "subclassed"}))
def test_every_kind_of_model_is_trained_as_by_keras(name: str, run_dir: Path) -> None:
    build, data = MODELS[name]
    assert_same_as_keras(build, *data(), run_dir, "local", epochs=2)


@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize("name", in_short(["ema", "global_clipnorm", *ACCUMULATING], list(ACCUMULATING)[:1]))
def test_two_servers_do_keras_maths(name: str, run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    make = {**OPTIMIZERS, **ACCUMULATING}[name]
    assert_same_as_keras(lambda: with_optimizer_built(make()), x, y, run_dir, "2ps1w")


@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize("name", in_short(["batch_normalized", "two_inputs_two_outputs"], {"two_inputs_two_outputs"}))
def test_two_servers_train_every_kind_of_model(name: str, run_dir: Path) -> None:
    build, data = MODELS[name]
    assert_same_as_keras(build, *data(), run_dir, "2ps1w", epochs=2)


@pytest.mark.parametrize("kind", in_short(["sample_weight", "class_weight"], {"sample_weight"}))
def test_weights_of_samples_and_classes_count_as_in_keras(kind: str, run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    weight: Any = np.linspace(0, 2, len(x)).astype(np.float32) if kind == "sample_weight" else {0: 0.2, 2: 3.0}

    def build() -> keras.Model:
        return models.mlp(weighted_metrics=["accuracy"])

    assert_same_as_keras(build, x, y, run_dir, "local", **{kind: weight})


SMOOTH = np.array([[0.9, 0.05, 0.05], [0.05, 0.05, 0.9], [0.05, 0.9, 0.05]], np.float32)
LABELS: dict[str, tuple[str, Any, dict[float, float], bool]] = {
    "time steps": ("sparse_categorical_crossentropy", np.arange(96).reshape(16, 6, 1) % 3, {0: 1, 2: 50}, True),
    "smoothed, one-hot": ("categorical_crossentropy", SMOOTH[np.arange(48) % 3], {0: 1.0, 1: 5.0, 2: 9.0}, False),
    "smoothed, of pixels": (
        "categorical_crossentropy",
        SMOOTH[np.arange(96).reshape(16, 6) % 3],
        {1: 5.0, 2: 2.0},
        True,
    ),
    "a column, smoothed": ("mse", np.array([[0.05], [0.95]] * 8, np.float32), {0: 0.5, 1: 4.0}, True),
    "nearly whole": ("mse", np.array([0, 0.9999999] * 8, np.float32), {0: 0.5, 1: 4.0}, False),
    "-1 and 1": ("hinge", np.array([[-1.0], [1.0]] * 8, np.float32), {-1: 0.5, 1: 4.0}, False),
    "with keys of np.unique": ("mse", np.array([0, 2, 3, 1] * 4), {np.float64(k): k + 0.5 for k in range(4)}, False),
}


@pytest.mark.parametrize("kind", in_short(LABELS, {"time steps"}))
def test_class_weight_counts_by_the_label_of_each_place(kind: str, run_dir: Path) -> None:
    loss, y, class_weight, from_dataset = LABELS[kind]
    places = [6] if y.ndim == 3 else []
    x = np.random.default_rng(0).normal(size=(len(y), *places, 4)).astype(np.float32)
    data = (tf.data.Dataset.from_tensor_slices((x, y)).batch(8),) if from_dataset else (x, y)

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        units, activation = (3, "softmax") if loss.endswith("crossentropy") else (1, None)
        model = keras.Sequential([keras.layers.Input(x.shape[1:]), keras.layers.Dense(units, activation=activation)])
        model.compile("sgd", loss, weighted_metrics=["mae"])
        return model

    options: dict[str, Any] = {"class_weight": class_weight, "batch_size": None if from_dataset else 8}
    expected = build().fit(*data, shuffle=False, verbose=0, **options).history
    found = kdist.Trainer(build, run_dir=run_dir).fit(*data, shuffle=False, verbose=0, **options).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_weight_decay_keeps_its_exclusions(run_dir: Path) -> None:
    def build() -> keras.Model:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model = models.mlp(optimizer)
        model.layers[-1].bias.assign(np.ones(3))
        return model

    x, y = toy_data(BATCH * STEPS)
    assert_same_as_keras(build, x, y, run_dir, "local")


def test_constraints_hold(run_dir: Path) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, kernel_constraint="non_neg")])
        model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = toy_data(BATCH * STEPS)
    assert_same_as_keras(build, x, y, run_dir, "local")


def test_mixed_precision_trains_as_by_keras(run_dir: Path) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        x, y = toy_data(BATCH * STEPS)
        trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
        history = trainer.fit(x, y, batch_size=BATCH, epochs=10, verbose=0)
    finally:
        keras.config.set_dtype_policy(before)
    assert history.history["loss"][-1] < 0.8 * history.history["loss"][0]
    assert {v.dtype for v in trainer.model.trainable_variables} == {"float32"}


def test_validation_is_that_of_keras(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    assert_same_as_keras(models.mlp, x, y, run_dir, "local", validation_split=0.25, epochs=3)


@pytest.mark.long
def test_a_second_fit_goes_on_from_the_model(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    keras.utils.set_random_seed(3)
    expected = models.mlp()
    for _ in range(2):
        expected.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    keras.utils.set_random_seed(3)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    for _ in range(2):
        trainer.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    for ours, theirs in zip(trainer.model.variables, expected.variables):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-6)
    assert int(trainer.model.optimizer.iterations) == 2 * STEPS
