"""Steps that are begun before the push of earlier ones is applied."""

from dataclasses import replace
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
from kdist.strategies.prefetch import PrefetchSearch
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
    """Table and kernel after gradient descent that computes each step before the last ones are applied."""
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


def test_the_ids_of_a_step_are_checked_whatever_other_checks_wait_for(run_dir: Path) -> None:
    """They may be of other workers, in a call on all of them."""
    training = prepared(run_dir)
    calls = UnrolledCalls(training.replica_step, store_of(training), iterator_spec(training.trace_dataset()))
    first, second = (op for op in calls.function(2).graph.get_operations() if op.type == "StatefulPartitionedCall")
    assert first not in second.control_inputs


def searched(
    compute_ms: float,
    wait_ms: float,
    call_ms: float,
    steps_per_call: int | None = None,
    last_step: int | None = 100_000,
    cost_secs: float = 0.1,
    *,
    prepare_secs: float = 10.0,
    for_ever: bool = False,
) -> tuple[list[tuple[int, int]], str]:
    """The steps per call and the prefetch that a search uses, one after the other, and why the last ones stay.

    Two workers compute and wait for so long in each step, and a call that does nothing takes `call_ms`.
    """
    search = PrefetchSearch(steps_per_call, 2, last_step, prepare_secs, call_ms / 1e3)
    used: list[tuple[int, int]] = []
    for _ in range(5_000):
        size, prefetch = search.steps_per_call, search.prefetch
        if [(size, prefetch)] != used[-1:]:
            used.append((size, prefetch))
            search.go_by({size: size * cost_secs / 2}, shares_step=False)
            search.observe(2 * size, size * cost_secs, warming_up=True)
        if search.why and not for_ever:
            break
        later = max(compute_ms, (compute_ms + wait_ms) / (min(prefetch, size - 1) + 1))
        secs = (call_ms + compute_ms + wait_ms + (size - 1) * later) / 1e3
        search.observe(2 * size, secs, warming_up=False)
    return used, search.why


@pytest.mark.parametrize(
    ("compute_ms", "wait_ms", "used", "why"),
    [
        (5, 0, [(1, 0), (64, 4), (64, 0)], "more is not faster"),
        (10, 10, [(1, 0), (64, 4), (64, 1)], "more is not faster"),
        (10, 20, [(1, 0), (64, 4), (64, 2)], "more is not faster"),
        (2, 20, [(1, 0), (64, 4)], "more is not tried"),
    ],
)
def test_as_few_steps_are_begun_ahead_as_hide_the_wait(
    compute_ms: float, wait_ms: float, used: list[tuple[int, int]], why: str
) -> None:
    assert searched(compute_ms, wait_ms, call_ms=12) == (used, why)


def test_no_more_is_tried_than_the_round_trip_can_need() -> None:
    assert searched(10, 3, call_ms=2) == ([(1, 0), (64, 1)], "more is not tried")
    assert searched(10, 0, call_ms=2) == ([(1, 0), (64, 1), (64, 0)], "more is not faster")


@pytest.mark.parametrize(
    ("given", "wait_ms", "used"),
    [
        (16, 20, [(1, 0), (16, 4), (16, 2)]),
        (16, 0, [(1, 0), (16, 4), (16, 0)]),
        (1, 20, [(1, 0)]),
    ],
)
def test_steps_per_call_that_are_given_stay(given: int, wait_ms: float, used: list[tuple[int, int]]) -> None:
    assert searched(10, wait_ms, 12, given)[0] == used


def test_calls_that_are_given_are_made_after_some_single_steps() -> None:
    search = PrefetchSearch(10, 1, 1_000, 10.0, 0.01)
    assert search.next_size(100) == 1
    search.observe(10, 0.3, warming_up=False)
    assert (search.next_size(100), search.next_size(9), search.prefetch) == (10, 4, 4)


def test_no_smaller_calls_are_prepared_near_the_end() -> None:
    search = PrefetchSearch(None, 4, 2_000, 10.0, 0.01)
    search.observe(10, 0.3, warming_up=False)
    assert search.steps_per_call > 1
    assert search.next_size(search.steps_per_call) == search.steps_per_call


@pytest.mark.parametrize(("last_step", "used"), [(30, [(1, 0)]), (120, [(1, 0), (4, 4)]), (1_600, [(1, 0), (16, 4)])])
def test_calls_are_as_large_as_pays_in_what_is_left_to_train(last_step: int, used: list[tuple[int, int]]) -> None:
    assert searched(2, 20, 12, last_step=last_step)[0] == used


def test_a_run_of_unknown_length_prepares_calls_when_it_has_lasted_as_long() -> None:
    assert searched(10, 10, 12, last_step=None) == ([(1, 0), (4, 4), (4, 1)], "more is not faster")
    used = searched(10, 10, 12, last_step=None, for_ever=True)[0]
    assert used == [(1, 0), (4, 4), (4, 1), (16, 1), (64, 1)]


def test_calls_are_neither_long_nor_long_prepared() -> None:
    assert searched(2, 200, 100)[0][1:] == [(16, 4)]
    assert searched(2, 20, 12, cost_secs=4.0)[0][1:] == [(4, 4)]
    assert searched(2, 20, 12, cost_secs=4.0, prepare_secs=40.0)[0][1:] == [(16, 4)]


def test_calls_are_prepared_within_the_time_that_a_stop_leaves_them(run_dir: Path) -> None:
    training = prepared(run_dir)
    for grace_secs, size in ((20.0, 1), (40.0, 4)):
        spec = replace(training.spec, grace_secs=grace_secs, last_step=1_000_000)
        sizer = replace(training, spec=spec).sizer()
        # Calls of four steps are expected to take 16 s.
        sizer.go_by({1: 100.0}, shares_step=False)
        sizer.observe(1, 9.0, warming_up=True)
        sizer.observe(1_000, 10.0, warming_up=False)
        assert sizer.steps_per_call == size
