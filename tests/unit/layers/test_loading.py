"""Models with layers of kdist are loaded by Keras after `import kdist`, in a process that has imported no layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist

LAYERS = {
    "pooled": lambda: kdist.layers.Embedding(20, 4, combiner="mean"),
    "dynamic": lambda: kdist.layers.DynamicEmbedding(4),
    "strings": lambda: kdist.layers.DynamicEmbedding(4, "string", combiner="sum"),
}
X = np.arange(60).reshape(20, 3) % 20


def build(name: str) -> keras.Model:
    layer = LAYERS[name]()
    ids = keras.Input((3,), dtype="string" if name == "strings" else "int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for name in LAYERS:
        x = tf.constant(X.astype("S") if name == "strings" else X)
        trainer = kdist.Trainer(lambda name=name: build(name), run_dir=folder / name)
        trainer.fit(x, np.ones((20, 1), np.float32), batch_size=10, steps=4, verbose=0)
        np.savez(folder / f"{name}.npz", x=x, y=trainer.model(x))
    return folder


def test_they_are_all_layers_of_kdist() -> None:
    found = {item for item in vars(kdist.layers).values() if isinstance(item, type) and issubclass(item, keras.Layer)}
    assert {type(make()) for make in LAYERS.values()} == found


@pytest.mark.parametrize(
    ("imports", "names"),
    [
        pytest.param("kdist, keras", ["pooled"], marks=pytest.mark.long),
        ("kdist, keras", ["dynamic", "strings"]),
        ("keras, kdist", list(LAYERS)),
        # TensorFlow is what a module below the layers imports first, and imports Keras.
        pytest.param("kdist, kdist._compat.tensorflow, keras", ["dynamic"], marks=pytest.mark.long),
    ],
)
def test_keras_loads_them_after_import_kdist(imports: str, names: list[str], folder: Path) -> None:
    code = f"""
import {imports}
import numpy as np, tensorflow as tf
for name in {names}:
    data = np.load(name + ".npz", allow_pickle=True)
    for load in keras.saving.load_model, keras.models.load_model:
        np.testing.assert_allclose(load(name + "/model.keras")(tf.constant(data["x"])), data["y"], rtol=1e-6)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
