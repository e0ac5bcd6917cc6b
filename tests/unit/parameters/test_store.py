"""Updates that were begun and not finished are seen by the counters of the servers; functions that push can end."""

from __future__ import annotations

import gc
import weakref
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
from kdist.config.schema import ServerOptions
from kdist.model.updates import ReplicaOutput
from kdist.parameters.store import ParameterStore
from kdist.strategies.prepared_training import prepare


@pytest.fixture
def store(run_dir: Path) -> ParameterStore:
    """Two servers, both of them this process."""
    return make_store(run_dir, num_servers=2)


def one_variable() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, use_bias=False)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def make_store(run_dir: Path, num_servers: int, build_model: Callable[[], keras.Model] = models.mlp) -> ParameterStore:
    trainer = kdist.Trainer(build_model, run_dir=run_dir)
    x, y = toy_data()
    request = trainer._fit_of(x, y, batch_size=8)
    prepared = prepare(request.training_spec(request.training_data), 1)
    return prepared.store(["/CPU:0"] * num_servers, prepared.plan(num_servers, ServerOptions()))


def push(store: ParameterStore, broken: int | None = None) -> None:
    """One update, with a gradient that cannot be computed in the place of one of them."""

    @tf.function(autograph=False)
    def call(is_broken: tf.Tensor) -> tf.Tensor:
        pulled = store.pull()
        gradients = [tf.ones_like(value) for value in pulled.trainable]
        if broken is not None:
            gradients[broken] = gradients[broken] + tf.cast(1 // (1 - is_broken), gradients[broken].dtype)
        unchanged = [None] * len(gradients)
        return store.push(ReplicaOutput(gradients, unchanged, [None] * len(pulled.state), [], 1), pulled)

    call(tf.constant(1))


def test_an_update_that_is_applied_is_whole(store: ParameterStore) -> None:
    for _ in range(3):
        push(store)
    assert store.counters.global_step() == 3
    assert store.counters.is_consistent()
    counters = [*store.counters.begun.values(), *store.counters.applied.values()]
    assert {int(counter.numpy()) for counter in counters} == {3}


def test_a_server_without_values_takes_no_part_in_updates(run_dir: Path) -> None:
    store = make_store(run_dir, num_servers=4, build_model=one_variable)
    push(store)
    assert store.counters.global_step() == 1
    assert store.servers == [*store.counters.begun] == [*store.counters.applied] == [0]


def test_an_update_without_its_gradient_is_not_counted(run_dir: Path) -> None:
    """The gradient of a model with one variable is the result of a function, which TensorFlow inlines."""
    store = make_store(run_dir, num_servers=1, build_model=one_variable)

    @tf.function(autograph=False)
    def gradient(value: tf.Tensor, is_broken: tf.Tensor) -> tf.Tensor:
        return tf.ones_like(value) * tf.cast(1 // (1 - is_broken), value.dtype)

    @tf.function(autograph=False)
    def call(is_broken: tf.Tensor) -> tf.Tensor:
        pulled = store.pull()
        gradients = [gradient(pulled.trainable[0], is_broken)]
        return store.push(ReplicaOutput(gradients, [None], [], [], 1), pulled)

    for _ in range(20):
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(tf.constant(1))
    assert store.counters.global_step() == 0
    call(tf.constant(0))
    assert store.counters.global_step() == 1


def test_an_update_that_ends_while_it_is_applied_is_not_whole(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(run_dir, num_servers=1)
    push(store)
    optimizer = store._optimizers._optimizers[0, 0]
    apply = optimizer.apply

    def apply_and_fail(gradients: Any, step: Any) -> None:
        apply(gradients, step)
        with tf.control_dependencies([step]):
            tf.debugging.Assert(tf.less(step, 0), [step])

    monkeypatch.setattr(optimizer, "apply", apply_and_fail)
    with pytest.raises(tf.errors.InvalidArgumentError):
        push(store)
    assert store.counters.global_step() == 2
    assert not store.counters.is_consistent()


@pytest.mark.parametrize("broken", in_short(range(4), {0, 3}))
def test_an_update_that_ends_in_the_middle_is_not_whole_or_was_never_begun(store: ParameterStore, broken: int) -> None:
    push(store)
    before = store.values.read()
    with pytest.raises(tf.errors.InvalidArgumentError):
        push(store, broken)
    after = store.values.read()
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    # Whatever was changed, the counters tell of it.
    assert not changed or not store.counters.is_consistent()
    store.align()
    assert store.counters.is_consistent()


def test_a_function_that_pushes_is_forgotten_when_another_one_has_replaced_it(store: ParameterStore) -> None:
    def call() -> tf.Tensor:
        pulled = store.pull()
        unchanged = [None] * len(pulled.trainable)
        gradients = [tf.ones_like(value) for value in pulled.trainable]
        return store.push(ReplicaOutput(gradients, unchanged, [None] * len(pulled.state), [], 1), pulled)

    graph = weakref.ref(tf.function(call, autograph=False).get_concrete_function().graph)
    gc.collect()
    assert graph() is None
