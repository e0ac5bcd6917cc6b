"""Tables that are stored as one on each server: the same numbers, and checkpoints with a value for each table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short
from keras import layers

import kdist
from kdist.config.schema import ServerOptions
from kdist.data.base import iterator_spec, make_dataset
from kdist.layers.initial_rows import made_on_servers
from kdist.model import replica_step
from kdist.model.embedding_lookup import TableGroup, group_tables
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.store import ParameterStore
from kdist.parameters.values.histograms import histograms_of
from kdist.strategies.calls import UnrolledCalls
from kdist.strategies.prepared_training import PreparedTraining, prepare

ROWS, DIM, BATCH = (12, 5, 1, 30), 4, 30
#: Tables of which a batch has each row once, so that Keras updates the rows of the batch, too.
FULL = (BATCH,) * 3

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
}


def data(lengths: Sequence[int] = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Batches with every row of every table."""
    rng = np.random.default_rng(5)
    column = [np.concatenate([rng.permutation(np.arange(BATCH) % rows) for _ in range(3)]) for rows in lengths]
    x = np.stack(column, 1).astype(np.int64)
    return x, rng.normal(size=(len(x), 1)).astype(np.float32)


def build(embedding: type[layers.Embedding], optimizer: str = "adam", lengths: Sequence[int] = ROWS) -> keras.Model:
    keras.utils.set_random_seed(2)
    ids = layers.Input((len(lengths),), dtype="int64")
    parts = [embedding(rows, DIM, name=f"table_{i}")(ids[:, i]) for i, rows in enumerate(lengths)]
    model = keras.Model(ids, layers.Dense(1, name="out")(layers.Concatenate()(parts)))
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def prepared(run_dir: Path, optimizer: str = "adam", lengths: Sequence[int] = ROWS) -> PreparedTraining:
    trainer = kdist.Trainer(lambda: build(kdist.layers.Embedding, optimizer, lengths), run_dir=run_dir)
    request = trainer._fit_of(*data(lengths), batch_size=BATCH, shuffle=False)
    return prepare(request.training_spec(request.training_data), 1)


def store_of(training: PreparedTraining, num_servers: int) -> ParameterStore:
    plan = training.plan(num_servers, ServerOptions())
    return training.store(["/job:localhost/task:0/device:CPU:0"] * num_servers, plan)


def train(training: PreparedTraining, store: ParameterStore, steps: int = 6) -> dict[str, np.ndarray]:
    make = training.trace_dataset()
    call = UnrolledCalls(training.replica_step, store, iterator_spec(make)).function(steps)
    call(iter(make_dataset(make, training.spec.data, 0, 1, 0)))
    return store.values.read()


@pytest.mark.parametrize("lengths", [ROWS, pytest.param(FULL, marks=pytest.mark.long)], ids=["several lengths", "full"])
@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=[pytest.mark.long] * (name != "adam")) for name in OPTIMIZERS]
)
def test_they_train_as_apart_and_as_by_keras(
    optimizer: str, lengths: tuple[int, ...], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = prepared(run_dir, optimizer, lengths)
    together = train(training, store_of(training, num_servers=3))

    def apart(tables: dict[int, Any], *others: Any) -> Sequence[TableGroup]:
        return [group for index, table in tables.items() for group in group_tables({index: table}, *others)]

    monkeypatch.setattr(replica_step, "group_tables", apart)
    training = prepared(run_dir, optimizer, lengths)
    assert len(training.replica_step.table_groups) == len(lengths)
    separate = train(training, store_of(training, num_servers=1))
    assert together.keys() == separate.keys()
    for name, value in together.items():
        np.testing.assert_allclose(value, separate[name], rtol=1e-6, atol=1e-6, err_msg=name)
    if lengths == FULL:
        expected = build(layers.Embedding, optimizer, lengths)
        expected.fit(*data(lengths), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        for variable in expected.trainable_variables:
            ours = together[f"parameters/{variable.path}"]
            np.testing.assert_allclose(ours, variable.numpy(), rtol=1e-5, atol=1e-6, err_msg=variable.path)


def test_a_server_has_one_variable_for_all_of_them(run_dir: Path) -> None:
    training = prepared(run_dir)
    store = store_of(training, num_servers=2)
    tables = [block for block in store.blocks if block.tables is not None]
    assert [block.server for block in tables] == [0, 1]
    # Each of them has rows on both, but for the one that has a single row.
    assert sum(len(block.shards) for block in tables) == 2 * len(ROWS) - 1
    shapes = store.values.shapes
    for i, rows in enumerate(ROWS):
        for kind in ("parameters/table_{}/embeddings", "slots/table_{}/embeddings/momentum"):
            assert shapes[kind.format(i)] == (rows, DIM)


@pytest.mark.parametrize("slice_bytes", in_short([1 << 26, 100], {100}), ids=["at once", "in pieces"])
def test_a_checkpoint_has_a_value_for_each_and_fits_other_servers(
    slice_bytes: int, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredShard, "slice_bytes", slice_bytes)
    training = prepared(run_dir)
    store = store_of(training, num_servers=3)
    expected = train(training, store)
    store.files.begin_save(tmp_path / "saved", {"seed": np.array(0)}, copies=False)()
    reader = tf.train.load_checkpoint(str(tmp_path / "saved"))
    for name, value in expected.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)
    assert expected["parameters/table_3/embeddings"].shape == (30, DIM)
    other = store_of(prepared(run_dir), num_servers=2)
    other.restore(tmp_path / "saved")
    for name, value in other.values.read().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_servers_draw_each_of_them_as_keras_would(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {
        f"parameters/{variable.path}": variable.numpy()
        for variable in build(kdist.layers.Embedding).trainable_variables
    }
    monkeypatch.setattr(StoredShard, "slice_bytes", 64)
    # Only the largest ones are drawn by servers; values of the others travel.
    monkeypatch.setattr("kdist.layers.initial_rows._BLOCK_BYTES", 12 * DIM * 4)
    with made_on_servers():
        training = prepared(run_dir)
    found = store_of(training, num_servers=2).values.read()
    for name, value in expected.items():
        if name != "parameters/table_3/embeddings":
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    # Drawn in several blocks, of which the first is as in Keras.
    np.testing.assert_array_equal(found["parameters/table_3/embeddings"][:12], expected[name_of(3)][:12])
    assert len(np.unique(found[name_of(3)])) == 30 * DIM


def name_of(table: int) -> str:
    return f"parameters/table_{table}/embeddings"


def test_histograms_are_of_each(run_dir: Path) -> None:
    store = store_of(prepared(run_dir), num_servers=2)
    values = store.values.read()
    for name, buckets in histograms_of(store.values)().items():
        assert buckets[:, 2].sum() == values[name].size
        assert buckets[0, 0] == values[name].min()
