"""Steps that are begun before the push of earlier ones is applied."""

from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import in_short
from keras import layers

import kdist
from kdist.config.schema import ServerOptions
from kdist.data.base import iterator_spec, make_dataset
from kdist.parameters.store import ParameterStore
from kdist.strategies.calls import UnrolledCalls
from kdist.strategies.parameter_server import PrefetchTuner
from kdist.strategies.prepared_training import PreparedTraining, prepare

STEPS, BATCH, ROWS, DIM, RATE = 6, 8, 5, 3, 0.1


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, ROWS, (STEPS * BATCH, 1))
    return ids, rng.normal(size=(STEPS * BATCH, DIM)).astype(np.float32)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = layers.Input((1,), dtype="int64")
    vectors = layers.Flatten()(kdist.layers.Embedding(ROWS, DIM, name="table")(ids))
    model = keras.Model(ids, layers.Dense(DIM, use_bias=False, name="out")(vectors))
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def prepared(run_dir: Path) -> PreparedTraining:
    trainer = kdist.Trainer(build, run_dir=run_dir)
    request = trainer._fit_of(*data(), batch_size=BATCH, shuffle=False)
    return prepare(request.training_spec(request.training_data), 1)


def store_of(training: PreparedTraining) -> ParameterStore:
    plan = training.plan(2, ServerOptions())
    return training.store(["/job:localhost/task:0/device:CPU:0"] * 2, plan)


def expected(prefetch: int) -> tuple[np.ndarray, np.ndarray]:
    """What gradient descent makes of table and kernel if it computes each step before the last ones are applied."""
    model = build()
    table, kernel = (np.array(value) for value in model.get_weights())
    late: list[tuple[np.ndarray, np.ndarray]] = []
    ids, targets = data()
    for step in range(STEPS):
        own = slice(step * BATCH, (step + 1) * BATCH)
        rows = table[ids[own, 0]]
        error = 2 * (rows @ kernel - targets[own]) / (BATCH * DIM)
        of_table = np.zeros_like(table)
        np.add.at(of_table, ids[own, 0], error @ kernel.T)
        late.append((of_table, rows.T @ error))
        if len(late) > prefetch:
            change, of_kernel = late.pop(0)
            table, kernel = table - RATE * change, kernel - RATE * of_kernel
    for change, of_kernel in late:
        table, kernel = table - RATE * change, kernel - RATE * of_kernel
    return table, kernel


@pytest.mark.parametrize("prefetch", in_short([0, 1, 3], {0, 3}))
def test_a_gradient_is_of_the_values_before_the_last_updates(prefetch: int, run_dir: Path) -> None:
    training = prepared(run_dir)
    store = store_of(training)
    make = training.trace_dataset()
    calls = UnrolledCalls(training.replica_step, store, iterator_spec(make), num_ahead=prefetch)
    logs = calls.logs.unpack(calls.function(STEPS)(iter(make_dataset(make, training.spec.data, 0, 1, 0))).numpy())
    assert logs.staleness.tolist() == [min(step, prefetch) for step in range(STEPS)]
    found = store.values.read()
    table, kernel = expected(prefetch)
    np.testing.assert_allclose(found["parameters/table/embeddings"], table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["parameters/out/kernel"], kernel, rtol=1e-5, atol=1e-6)


def tried(rates: dict[int, float]) -> tuple[list[int], str]:
    """What a tuner uses, one after the other, if training is as fast as `rates` says for each; why it ends."""
    tuner, used = PrefetchTuner(), [0]
    while not tuner.why:
        if tuner.observe(round(rates[tuner.prefetch]), 1.0):
            used.append(tuner.prefetch)
    return used, tuner.why


@pytest.mark.parametrize(
    ("rates", "used", "why"),
    [
        ({0: 100, 1: 110}, [0, 1, 0], "more is not faster"),
        ({0: 100, 1: 190, 2: 200}, [0, 1, 2, 1], "more is not faster"),
        ({0: 100, 1: 190, 2: 240, 4: 250}, [0, 1, 2, 4, 2], "more is not faster"),
        ({0: 100, 1: 190, 2: 240, 4: 300}, [0, 1, 2, 4], "more is not tried"),
    ],
)
def test_more_steps_are_begun_as_long_as_each_number_is_faster(
    rates: dict[int, float], used: list[int], why: str
) -> None:
    assert tried(rates) == (used, why)
