"""Models and data that hold tensors of this process: an adapted layer, a lookup, a constant; over several clusters."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.hooks import CheckpointSaver, Hook

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

X = np.random.default_rng(3).normal(size=(64, 3)).astype(np.float32)
WORDS = np.array([["a"], ["b"], ["c"], ["d"]] * 16)
Y = X.sum(1)


def build() -> keras.Model:
    """All that it captures was made before: this is the usual order of `adapt` and `fit`."""
    keras.utils.set_random_seed(1)
    numbers, word = keras.Input((3,), name="numbers"), keras.Input((1,), name="word", dtype="string")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(6, 2)(_lookup(word)))
    scaled = keras.layers.Lambda(lambda values: values * _factors)(_normalization(numbers))
    model = keras.Model([numbers, word], keras.layers.Dense(1)(keras.layers.Concatenate()([scaled, embedded])))
    model.compile("sgd", lambda y, outputs: keras.ops.mean(keras.ops.square(y - outputs)) * _factors[0])
    return model


_normalization = keras.layers.Normalization()
_normalization.adapt(X)
_lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d"])
_factors = tf.constant([1.0, 2.0, 3.0])


def batches() -> tf.data.Dataset:
    added = tf.constant(np.full(300, 1.0, np.float32))
    inputs = {"numbers": X, "word": WORDS}
    return tf.data.Dataset.from_tensor_slices((inputs, Y)).map(lambda x, y: (x, y + added[0])).batch(8)


@pytest.mark.long
def test_a_second_fit_has_the_same_numbers_as_in_keras(run_dir: Path) -> None:
    data, plain = batches(), build()
    trainer = kdist.Trainer(build, "1ps1w", run_dir=run_dir)
    for _ in range(2):
        expected = plain.fit(data, epochs=2, validation_data=data, verbose=0).history
        # The second one is with another cluster.
        found = trainer.fit(data, epochs=2, validation_data=data, verbose=0).history
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4)


class KillOnce(Hook):
    """Kills a parameter server at a step."""

    def __init__(self, step: int) -> None:
        self._step: int | None = step

    def due_in(self, step: int) -> int:
        return 10

    def after_run(self, context: Any, values: Any) -> None:
        if self._step is not None and values.global_step >= self._step:
            self._step = None
            pids = {str(task): pid for task, pid in context.session.strategy.pids.items()}
            os.kill(pids["ps:0"], signal.SIGKILL)


def test_a_lost_server_costs_the_steps_since_the_newest_checkpoint(run_dir: Path) -> None:
    hooks = [KillOnce(60), CheckpointSaver(every_steps=20)]
    trainer = kdist.Trainer(build, "2ps2w", run_dir=run_dir, hooks=hooks, steps_per_call=2)
    trainer.fit(batches(), steps=120, verbose=0)
    assert trainer.result.status == "done"
    assert trainer.result.global_step == 120
    assert trainer.result.restarts["cluster"] == 1
