"""Every class of Keras does under `Trainer.fit` what it does under `keras.Model.fit`, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import compatibility
import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from compatibility import OPTIMIZERS, PLACED, SCHEDULES, classes_of, compared, targets
from compatible_layers import BATCH, FAMILIES
from helpers import toy_data
from test_keras_parity import assert_same_as_keras, with_optimizer_built

import kdist
from kdist._compat.keras import layers_of


def in_short(table: dict[str, Any], module: Any, *names: str) -> list[Any]:
    """The names in a table that this version of Keras has, all but these marked as long."""
    present = [name for name in table if hasattr(module, name)]
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in names)) for name in present]


# In Keras 3.12, `fit` itself fails with Muon on TensorFlow.
MUON_WORKS = "momentums" in keras.optimizers.Muon.build.__code__.co_names
TRAINABLE_WITH = {name: make for name, make in OPTIMIZERS.items() if name != "Muon" or MUON_WORKS}


def placed(short: str) -> pytest.MarkDecorator:
    """Servers do everything that one process does; one of the two is in the short run."""
    clusters: dict[str, list[Any]] = {"local": [], "2ps1w": [pytest.mark.cluster]}
    return pytest.mark.parametrize(
        "cluster",
        [pytest.param(name, marks=[*marks, *[pytest.mark.long] * (name != short)]) for name, marks in clusters.items()],
    )


on_servers, here = placed("2ps1w"), placed("local")


@pytest.mark.parametrize("kind", PLACED)
def test_every_class_is_placed(kind: str) -> None:
    known, placed = set(classes_of(kind)), set(PLACED[kind])
    assert not known - placed, f"place in tests/oracle/compatibility.py: {sorted(known - placed)}"


def test_the_page_is_that_of_the_tables() -> None:
    written = compatibility.PAGE.read_text()
    assert written == compatibility.page(), "run python tests/oracle/compatibility.py"


@on_servers
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * f.long) for n, f in FAMILIES.items()])
@pytest.mark.usefixtures("tasks_prepared")
def test_every_layer(name: str, cluster: str, run_dir: Path) -> None:
    family = FAMILIES[name]
    # Neither Keras nor kdist takes strings as NumPy arrays.
    x = tf.constant(family.x) if family.x.dtype == object else family.x
    if family.draws:
        trainer = kdist.Trainer(family.build, cluster=cluster, run_dir=run_dir)
        history = trainer.fit(x, family.targets, batch_size=BATCH, epochs=2, verbose=0)
        assert np.isfinite(history.history["loss"]).all()
        before = {v.path: v.numpy() for v in family.build().trainable_variables}
        for variable in trainer.model.trainable_variables:
            assert np.abs(variable.numpy() - before[variable.path]).max() > 0, f"{variable.path} was not trained"
        model = trainer.model
    else:
        model = assert_same_as_keras(family.build, x, family.targets, run_dir, cluster, batch_size=BATCH, epochs=2)
    used = {kind for layer in layers_of(model) for kind in type(layer).__mro__}
    assert {n for n in family.present() if getattr(keras.layers, n) not in used} == set()


@on_servers
@pytest.mark.long
@pytest.mark.usefixtures("tasks_prepared")
def test_every_loss_and_every_metric(cluster: str, run_dir: Path) -> None:
    assert_same_as_keras(compared, compatibility.X, targets(), run_dir, cluster, batch_size=BATCH, epochs=2)


@here
@pytest.mark.parametrize("name", in_short(TRAINABLE_WITH, keras.optimizers, "Nadam"))
@pytest.mark.usefixtures("tasks_prepared")
def test_every_optimizer(name: str, cluster: str, run_dir: Path) -> None:
    assert type(OPTIMIZERS[name]()) is getattr(keras.optimizers, name)
    assert_same_as_keras(lambda: with_optimizer_built(OPTIMIZERS[name]()), *toy_data(BATCH * 6), run_dir, cluster)


@here
@pytest.mark.parametrize("name", in_short(SCHEDULES, keras.optimizers.schedules, "CosineDecay"))
@pytest.mark.usefixtures("tasks_prepared")
def test_every_schedule(name: str, cluster: str, run_dir: Path) -> None:
    assert type(SCHEDULES[name]()) is getattr(keras.optimizers.schedules, name)
    data = toy_data(BATCH * 6)
    assert_same_as_keras(lambda: models.mlp(keras.optimizers.SGD(SCHEDULES[name]())), *data, run_dir, cluster)


def test_a_saved_function_that_is_trained_is_refused(tmp_path: Path) -> None:
    inner = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
    inner.export(tmp_path / "saved", verbose=False)

    def build() -> keras.Model:
        saved = keras.layers.TFSMLayer(tmp_path / "saved", call_endpoint="serve")
        model = keras.Sequential([keras.layers.Input((6,)), saved, keras.layers.Dense(1)])
        model.compile("sgd", "mean_squared_error")
        return model

    with pytest.raises(kdist.ConfigError, match="TFSMLayer cannot be trained here.*trainable=False"):
        kdist.Trainer(build, run_dir=tmp_path / "run").fit(*toy_data(BATCH), steps=1, verbose=0)
