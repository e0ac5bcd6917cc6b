"""Stateful layers as by Keras, if it resets them at the end of each epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from helpers import toy_data
from test_keras_parity import assert_same_as_keras

import kdist

BATCH, STEPS = 8, 5


class Reset(keras.callbacks.Callback):
    """Resets the states of all layers at the end of each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for layer in self.model.layers:
            if hasattr(layer, "reset_states"):
                layer.reset_states()


class ResetInTheMiddle(Reset):
    """Also those of one layer, in the middle of each epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.layers[1].reset_state()


def stateful(layer: Any = None) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,), batch_size=BATCH),
            layers.Reshape((3, 2)),
            layer or layers.LSTM(4, stateful=True, return_sequences=True),
            layers.Bidirectional(layers.GRU(3, stateful=True)),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", jit_compile=False)
    return model


@pytest.mark.parametrize("reset", [Reset, pytest.param(ResetInTheMiddle, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "cluster",
    [pytest.param("local", marks=pytest.mark.long), pytest.param("2ps1w", marks=pytest.mark.cluster)],
)
@pytest.mark.usefixtures("tasks_prepared")
def test_states_are_those_of_keras(cluster: str, reset: type[Reset], run_dir: Path) -> None:
    assert_same_as_keras(
        stateful, *toy_data(BATCH * STEPS), run_dir, cluster, batch_size=BATCH, epochs=3, callbacks=[reset()]
    )


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
def test_states_are_reset_at_epochs_and_matter(tmp_path: Path) -> None:
    def trained(name: str, build: Any, cluster: str, **arguments: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        trainer = kdist.Trainer(build, cluster=cluster, run_dir=tmp_path / name)
        data = toy_data(BATCH * STEPS)
        trainer.fit(*data, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, **arguments)
        return trainer.model.get_weights()

    expected = trained("asked", stateful, "local", callbacks=[Reset()])
    for ours, theirs in zip(trained("unasked", stateful, "2ps1w"), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    stateless = trained("stateless", lambda: stateful(keras.layers.LSTM(4, return_sequences=True)), "local")
    assert any(not np.allclose(ours, theirs, rtol=1e-2) for ours, theirs in zip(stateless, expected))


def test_other_stateful_layers_are_refused(run_dir: Path) -> None:
    class Own(keras.layers.Layer):
        stateful = True

    trainer = kdist.Trainer(lambda: stateful(Own(name="own")), run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=r"own: only layers that derive from keras.layers.RNN may be stateful"):
        trainer.fit(*toy_data(BATCH), batch_size=BATCH, verbose=0)
