"""State that layers assign, with several workers: what adds up is added, anything else is a value of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import kdist

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

NUM_EXAMPLES, BATCH, PLACES = 512, 8, 32
X = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype(np.float32)


class Memory(keras.layers.Layer):
    """Keeps the last normalized inputs in a queue, as contrastive models do, and state of other kinds."""

    def build(self, shape: Any) -> None:
        def state(name: str, *sizes: int, **arguments: Any) -> Any:
            return self.add_weight(shape=sizes, initializer="zeros", trainable=False, name=name, **arguments)

        self.has_begun, self.index, self.last = state("has_begun"), state("index", dtype="int32"), state("last", 4)
        self.seen, self.share = state("seen", aggregation="sum"), state("share", aggregation="mean")
        self.count = state("count", dtype="int32", aggregation="sum")
        self.age = state("age", dtype="uint8", aggregation="mean")
        self.queue = state("queue", PLACES, 4)
        self.queue.assign(ops.normalize(ops.ones((PLACES, 4)), axis=1))
        self.probability = state("probability")

    def call(self, inputs: Any) -> Any:
        rows = ops.normalize(inputs, axis=1)
        self.has_begun.assign(1.0)
        self.index.assign((self.index + BATCH) % PLACES)
        self.queue.assign(ops.concatenate([rows, self.queue[:-BATCH]], axis=0))
        self.probability.assign(ops.clip(self.probability + 0.3, 0.0, 1.0))
        self.last.assign(inputs[-1])
        self.seen.assign_add(float(BATCH))
        self.count.assign_add(BATCH)
        # As an age that ends at 200: the sum of two is more than a byte.
        self.age.assign(ops.minimum(self.age + 50, 200))
        self.share.assign(0.5 * self.share + 0.5)
        return inputs


def build() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((4,)), Memory(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        ("2ps2w", "parameter_server"),
        pytest.param("1ps2w", "sync_replicas", marks=pytest.mark.long),
        pytest.param("2w", "auto", marks=pytest.mark.long),
    ],
)
def test_no_value_is_one_that_nobody_has_computed(cluster: str, strategy: str, run_dir: Path) -> None:
    trainer = kdist.Trainer(build, cluster, strategy, run_dir=run_dir)
    trainer.fit(X, X.sum(1), batch_size=BATCH, epochs=2, verbose=0)
    memory = trainer.model.layers[0]
    assert float(memory.has_begun.numpy()) == 1.0
    assert float(memory.probability.numpy()) == 1.0
    assert int(memory.index.numpy()) in range(0, PLACES, BATCH)
    np.testing.assert_allclose(np.linalg.norm(memory.queue.numpy(), axis=1), 1.0, rtol=1e-5)
    assert np.isclose(X, memory.last.numpy(), atol=1e-6).all(1).any()
    # The sum over the workers, whether an update is of one or of all of them.
    assert float(memory.seen.numpy()) == int(memory.count.numpy()) == 2 * NUM_EXAMPLES
    assert int(memory.age.numpy()) == 200
    assert float(memory.share.numpy()) == pytest.approx(1.0, abs=1e-3)
