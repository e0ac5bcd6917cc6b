"""Models with several tables, whose lookups are found before rows are fetched. In one process, compared with Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short
from keras import layers, ops

import kdist
from kdist.model.replica_step import ReplicaStep
from kdist.strategies.prepared_training import prepare

ROWS, DIM = 12, 4


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).integers(0, ROWS, (64, 3)).astype(np.int32)
    return x, (x.sum(1) % 2).astype(np.int64)


def compiled(outputs: Any, inputs: Any, optimizer: Any = "sgd") -> keras.Model:
    model = keras.Model(inputs, layers.Dense(2, "softmax", name="out")(layers.Flatten()(outputs)))
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def many_tables(embedding: type[layers.Embedding]) -> keras.Model:
    """Tables of several lengths and widths, one of them looked up twice."""
    ids = layers.Input((3,), dtype="int32")
    shared = embedding(ROWS, DIM)
    parts = [shared(ids[:, :1]), embedding(ROWS + 5, DIM)(ids), embedding(ROWS, 2 * DIM)(ids[:, 1:2]), shared(ids)]
    return compiled(layers.Concatenate()([layers.Flatten()(part) for part in parts]), ids)


class ByRows(layers.Layer):
    """Looks up one table by the rows of another one."""

    def __init__(self, embedding: type[layers.Embedding]) -> None:
        super().__init__()
        self.codes, self.words = embedding(ROWS, DIM), embedding(ROWS, DIM)

    def call(self, ids: Any) -> Any:
        codes = self.codes(ids)
        best = ops.argmax(ops.stop_gradient(codes), -1)
        return ops.concatenate([codes, self.words(ids), self.words(best + ids % 2)], -1)


def one_after_the_other(embedding: type[layers.Embedding]) -> keras.Model:
    ids = layers.Input((3,), dtype="int32")
    return compiled(ByRows(embedding)(ids), ids)


class Hashed(layers.Layer):
    """Ids that depend on a weight, and on state that the step changes."""

    def build(self, input_shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="ones")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, ids: Any) -> Any:
        self.calls.assign(self.calls + 1)
        return (ids + ops.cast(ops.stop_gradient(self.weight) * 2, "int32") + self.calls) % ROWS


def ids_of_weights(embedding: type[layers.Embedding]) -> keras.Model:
    ids = layers.Input((3,), dtype="int32")
    hashed = Hashed()(ids)
    return compiled(layers.BatchNormalization()(embedding(ROWS, DIM)(hashed)), ids)


def without_gradient(embedding: type[layers.Embedding]) -> keras.Model:
    """One table that the loss does not depend on."""
    ids = layers.Input((3,), dtype="int32")
    parts = [embedding(ROWS, DIM)(ids), layers.Lambda(ops.stop_gradient)(embedding(ROWS, DIM)(ids))]
    return compiled(layers.Concatenate()(parts), ids)


def recurrent(embedding: type[layers.Embedding]) -> keras.Model:
    ids = layers.Input((3,), dtype="int32")
    parts = [embedding(ROWS, DIM, mask_zero=True)(ids), embedding(ROWS, DIM, mask_zero=True)(ids)]
    return compiled(layers.LSTM(3)(layers.Concatenate()(parts)), ids)


def trained(build: Callable[..., keras.Model], run_dir: Path, embedding: type[layers.Embedding]) -> keras.Model:
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        return build(embedding)

    trainer = kdist.Trainer(make, run_dir=run_dir)
    trainer.fit(*data(), batch_size=16, shuffle=False, epochs=2, verbose=0)
    return trainer.model


@pytest.mark.parametrize("embedding", in_short([kdist.layers.Embedding, layers.Embedding], {kdist.layers.Embedding}))
@pytest.mark.parametrize(
    "build",
    in_short([many_tables, one_after_the_other, ids_of_weights, without_gradient, recurrent], {many_tables}),
    ids=lambda b: b.__name__,
)
def test_models_of_several_lookups_train_as_by_keras(build: Any, embedding: Any, run_dir: Path) -> None:
    keras.utils.set_random_seed(3)
    expected = build(layers.Embedding)
    expected.fit(*data(), batch_size=16, shuffle=False, epochs=2, verbose=0)
    model = trained(build, run_dir, embedding)
    for ours, theirs in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def step_of(build: Callable[..., keras.Model], run_dir: Path) -> ReplicaStep:
    request = kdist.Trainer(lambda: build(kdist.layers.Embedding), run_dir=run_dir)._fit_of(*data(), batch_size=16)
    return prepare(request.training_spec(request.training_data), 1).replica_step


@pytest.mark.parametrize(
    ("build", "groups", "rounds"),
    [
        (many_tables, [2, 1], 1),
        (one_after_the_other, [2], 2),
        (ids_of_weights, [1], 1),
        # What gets no gradient must not be updated with the others, not even by nothing.
        (without_gradient, [1, 1], 1),
    ],
)
def test_tables_of_one_group_are_fetched_together(build: Any, groups: list[int], rounds: int, run_dir: Path) -> None:
    step = step_of(build, run_dir)
    assert [len(group.tables) for group in step.table_groups] == groups
    found = step._lookups
    assert len(found._rounds) == rounds
    assert set(found._rounds[0]) == set(range(len(groups)))


def test_optimizers_that_treat_tables_differently_get_a_group_each(run_dir: Path) -> None:
    def build(embedding: type[layers.Embedding]) -> keras.Model:
        model = many_tables(embedding)
        optimizer = keras.optimizers.AdamW()
        optimizer.exclude_from_weight_decay(var_list=[model.trainable_variables[0]])
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    assert [len(group.tables) for group in step_of(build, run_dir).table_groups] == [1, 1, 1]


class Counted(layers.Layer):
    """Counts, in this process, how often it runs."""

    runs = 0

    def call(self, ids: Any) -> Any:
        tf.py_function(self._count, [], [])
        return ids

    def _count(self) -> None:
        Counted.runs += 1


def test_what_computes_ids_runs_once_per_step(run_dir: Path) -> None:
    def build() -> keras.Model:
        ids = layers.Input((3,), dtype="int32")
        return compiled(kdist.layers.Embedding(ROWS, DIM)(Counted()(ids)), ids)

    Counted.runs = 0
    kdist.Trainer(build, run_dir=run_dir).fit(*data(), batch_size=16, steps=5, verbose=0)
    assert Counted.runs == 5


@pytest.mark.parametrize(
    ("column", "wrong", "table", "rows"),
    [pytest.param(0, ROWS, "first", ROWS, marks=pytest.mark.long), (1, -1, "second", 7)],
)
def test_a_wrong_id_is_named_with_its_own_table(column: int, wrong: int, table: str, rows: int, run_dir: Path) -> None:
    def build() -> keras.Model:
        ids = layers.Input((2,), dtype="int32")
        first, second = kdist.layers.Embedding(ROWS, DIM, name="first"), kdist.layers.Embedding(7, DIM, name="second")
        return compiled(layers.Concatenate()([first(ids[:, 0]), second(ids[:, 1])]), ids)

    x = np.random.default_rng(1).integers(0, 7, (64, 2)).astype(np.int32)
    x[5, column] = wrong
    trainer = kdist.Trainer(build, run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=rf"id {wrong} is not in table {table}/embeddings, .* 0 to {rows - 1}$"):
        trainer.fit(x, np.zeros(64, np.int64), batch_size=16, shuffle=False, verbose=0)
