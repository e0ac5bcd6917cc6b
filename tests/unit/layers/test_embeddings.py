"""Embedding tables: looked up by rows, updated by rows, or whole, and what the plan says of it. In one process."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short
from keras import layers

import kdist
from kdist.layers import Embedding
from kdist.layers.initial_rows import TableInitializer

ROWS, DIM = 30, 4


def data(num_ids: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.integers(0, num_ids, (64, 3)).astype(np.int32)
    return x, (x.sum(1) % 2).astype(np.int64)


def build(embedding: type[layers.Embedding], optimizer: Any = "adam", **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            layers.Input((3,), dtype="int32"),
            embedding(ROWS, DIM, **arguments),
            layers.Flatten(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def train(build_model: Any, run_dir: Path, x: np.ndarray, y: np.ndarray) -> keras.Model:
    trainer = kdist.Trainer(build_model, run_dir=run_dir)
    trainer.fit(x, y, batch_size=16, shuffle=False, epochs=3, verbose=0)
    return trainer.model


@pytest.mark.parametrize("optimizer", in_short(["adam", "adamw", "ftrl", "rmsprop", "adagrad"], {"adam"}))
def test_rows_that_no_batch_looks_up_keep_values_and_slots(optimizer: str, run_dir: Path) -> None:
    x, y = data(num_ids=10)
    before = build(Embedding, optimizer).get_weights()[0]
    model = train(lambda: build(Embedding, optimizer), run_dir, x, y)
    np.testing.assert_array_equal(model.get_weights()[0][10:], before[10:])
    assert (model.get_weights()[0][:10] != before[:10]).all()
    fresh = build(Embedding, optimizer)
    fresh.optimizer.build(fresh.trainable_variables)
    for slot, initial in zip(model.optimizer.variables, fresh.optimizer.variables):
        if slot.shape == (ROWS, DIM):
            np.testing.assert_array_equal(slot.numpy()[10:], initial.numpy()[10:])
            assert (slot.numpy()[:10] != initial.numpy()[:10]).any()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    ],
    ids=["plain", "averages"],
)
def test_without_moments_rows_are_updated_as_by_keras(options: dict[str, Any], run_dir: Path) -> None:
    x, y = data()
    expected = build(layers.Embedding, keras.optimizers.SGD(**options))
    expected.fit(x, y, batch_size=16, shuffle=False, epochs=3, verbose=0)
    model = train(lambda: build(Embedding, keras.optimizers.SGD(**options)), run_dir, x, y)
    for ours, theirs in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_when_a_batch_has_every_row_once_rows_are_updated_as_by_keras(run_dir: Path) -> None:
    x = np.stack([np.random.default_rng(i).permutation(ROWS) for i in range(8)]).reshape(-1, 3).astype(np.int32)
    y = (x[:, 0] % 2).astype(np.int64)

    def fit(model: keras.Model) -> keras.Model:
        model.fit(x, y, batch_size=ROWS // 3, shuffle=False, verbose=0)
        return model

    optimizers = [lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)]
    for i, optimizer in enumerate(optimizers):
        expected = fit(build(layers.Embedding, optimizer()))
        trainer = kdist.Trainer(lambda make=optimizer: build(Embedding, make()), run_dir=run_dir / str(i))
        trainer.fit(x, y, batch_size=ROWS // 3, shuffle=False, verbose=0)
        for ours, theirs in zip(trainer.model.variables, expected.variables):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-5, atol=2e-6)


def tied() -> keras.Model:
    """Reads its table outside of the layer as well."""

    class Tied(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = layers.Embedding(ROWS, DIM)

        def call(self, ids: Any) -> Any:
            hidden = keras.ops.mean(self.embedding(ids), 1)
            return keras.ops.matmul(hidden, keras.ops.transpose(self.embedding.embeddings))

    model = Tied()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("build_model", "note"),
    [
        (lambda: build(Embedding), "looked up by rows"),
        (lambda: build(layers.Embedding, "sgd"), "looked up by rows"),
        (lambda: build(layers.Embedding), "looked up by rows; Adam updates every row in every step"),
        (lambda: build(Embedding, embeddings_regularizer="l2"), "because of its regularizer"),
        (lambda: build(layers.Embedding, embeddings_constraint="non_neg"), "because of its constraint"),
        (tied, "because of another use of it in the model"),
    ],
)
def test_the_plan_says_how_a_table_is_looked_up(build_model: Any, note: str, run_dir: Path) -> None:
    x, y = data()
    trainer = kdist.Trainer(build_model, cluster="2ps1w", run_dir=run_dir)
    table = trainer.plan(x, y, batch_size=16).table()
    assert note in table
    assert (run_dir / "placement.txt").read_text() == table


def test_the_plan_knows_the_ids_of_an_example_and_what_a_step_changes(run_dir: Path) -> None:
    def build_model(*, ragged: bool) -> keras.Model:
        ids = layers.Input((None,) if ragged else (4,), dtype="int64", ragged=ragged)
        looked_up = Embedding(ROWS, DIM, combiner="mean" if ragged else None)(ids)
        hidden = layers.BatchNormalization(name="norm")(layers.Dense(3, trainable=False, name="frozen")(looked_up))
        model = keras.Model(ids, layers.Dense(1)(hidden if ragged else layers.Flatten()(hidden)))
        model.compile("adam", "mse")
        return model

    x = np.arange(32).reshape(8, 4) % ROWS
    for ragged in (False, True):
        ids = tf.RaggedTensor.from_tensor(x) if ragged else x
        trainer = kdist.Trainer(partial(build_model, ragged=ragged), cluster="2ps1w", run_dir=run_dir / str(ragged))
        plan = trainer.plan(ids, np.zeros(8), batch_size=4)
        table, *others = plan.variables
        assert plan.batch_size == 4
        assert (table.ids_per_example, table.num_pushes) == (None if ragged else 4, 1)
        assert {variable.num_pulls for variable in plan.variables} == {1}
        unchanged = {variable.name for variable in others if not variable.num_pushes}
        assert unchanged == {"frozen/kernel", "frozen/bias"}


def test_a_step_of_several_batches_looks_up_the_ids_of_all_of_them(run_dir: Path) -> None:
    x, y = data()
    trainer = kdist.Trainer(
        lambda: build(Embedding), cluster="2ps1w", strategy="parameter_server", run_dir=run_dir, local_steps=4
    )
    assert trainer.plan(x, y, batch_size=4).batch_size == 16


@pytest.mark.long
def test_a_table_that_is_needed_whole_trains_as_by_keras(run_dir: Path) -> None:
    x, y = data()
    for i, make in enumerate([tied, lambda: build(Embedding, embeddings_regularizer="l2")]):
        keras.utils.set_random_seed(3)
        expected = make()
        expected.fit(x, y, batch_size=16, shuffle=False, epochs=3, verbose=0)
        keras.utils.set_random_seed(3)
        model = train(make, run_dir / str(i), x, y)
        for ours, theirs in zip(model.get_weights(), expected.get_weights()):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_it_is_cut_over_all_servers_under_every_policy(run_dir: Path) -> None:
    x, y = data()
    trainer = kdist.Trainer(lambda: build(Embedding), cluster="3ps1w", run_dir=run_dir)
    shards = [shard for shard in trainer.plan(x, y).shards if shard.variable == 0]
    assert [(shard.server, shard.start, shard.stop) for shard in shards] == [(0, 0, 10), (1, 10, 20), (2, 20, 30)]


def test_the_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    model = build(Embedding, mask_zero=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is Embedding
    x, _ = data()
    np.testing.assert_array_equal(loaded(x).numpy(), model(x).numpy())


@pytest.mark.long
def test_model_keras_is_read_without_kdist(run_dir: Path) -> None:
    x, y = data()
    model = train(lambda: build(Embedding), run_dir, x, y)
    np.save(run_dir / "x.npy", x)
    code = (
        "import sys, keras, numpy as np; m = keras.saving.load_model('model.keras');"
        "np.save('y.npy', m(np.load('x.npy'))); assert not any(name.startswith('kdist') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=run_dir, timeout=60)
    np.testing.assert_allclose(np.load(run_dir / "y.npy"), model(x).numpy(), rtol=1e-5)


INITIALIZERS = [
    "uniform",
    "zeros",
    "glorot_uniform",
    "he_normal",
    keras.initializers.Constant(0.5),
    keras.initializers.TruncatedNormal(stddev=0.1, seed=5),
    keras.initializers.VarianceScaling(2.0, "fan_avg", "untruncated_normal", seed=3),
]


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=range(len(INITIALIZERS)))
def test_the_first_block_of_a_table_is_drawn_as_by_keras(initializer: Any) -> None:
    keras.utils.set_random_seed(3)
    layer = layers.Embedding(ROWS, DIM, embeddings_initializer=initializer)
    layer.build()
    drawn = TableInitializer.of(layer.embeddings_initializer, (ROWS, DIM))
    assert drawn is not None
    np.testing.assert_array_equal(drawn((ROWS, DIM), "float32"), layer.embeddings.numpy())


def test_blocks_differ_and_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.layers.initial_rows._BLOCK_BYTES", 7 * DIM * 4)
    keras.utils.set_random_seed(3)
    layer = Embedding(ROWS, DIM)
    layer.build()
    table = layer.embeddings.numpy()
    drawn = TableInitializer.of(layer.embeddings_initializer, (ROWS, DIM))
    assert drawn is not None
    blocks = drawn.blocks((ROWS, DIM), "float32")
    assert blocks == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]
    for number, (start, stop) in enumerate(blocks):
        np.testing.assert_array_equal(drawn.block(number, (ROWS, DIM), "float32"), table[start:stop])
    assert len(np.unique(table)) == table.size
    # What is saved is what was given.
    assert layer.get_config()["embeddings_initializer"]["class_name"] == "RandomUniform"


def own_zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("initializer", ["orthogonal", own_zeros])
def test_what_may_depend_on_the_whole_table_is_drawn_whole(initializer: Any) -> None:
    assert TableInitializer.of(keras.initializers.get(initializer), (ROWS, DIM)) is None


@pytest.mark.parametrize("wrong", in_short([ROWS, -7], {ROWS}))
def test_an_id_that_is_not_in_its_table_is_named_with_it(wrong: int, run_dir: Path) -> None:
    x, y = data()
    x[5, 1] = wrong
    with pytest.raises(kdist.TaskError, match=rf"id {wrong} is not in table embedding/embeddings, .* 0 to 29"):
        train(lambda: build(Embedding), run_dir, x, y)
