"""`DynamicEmbedding` in one process: trained as a fixed table, saved, exported, and refused where it cannot work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import kdist
from kdist.layers import Admission, DynamicEmbedding, Eviction
from kdist.layers.initial_rows import RowInitializer

DIM, KNOWN = 4, 20
UNIFORM = {"class_name": "RandomUniform", "config": {"seed": 3}}


def ids_of(numbers: Any) -> np.ndarray:
    """Ids that are no row numbers, by their numbers."""
    return np.asarray(numbers, np.int64) * 1_000_003 - 7


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, KNOWN, (96, 3)), rng.normal(size=(96, 1)).astype(np.float32)


def compiled(layer: layers.Layer, optimizer: Any = None, dtype: str = "int64") -> keras.Model:
    ids = layers.Input((3,), dtype=dtype)
    out = layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(5), name="out")
    model = keras.Model(ids, out(layers.Flatten()(layer(ids))))
    model.compile(optimizer or keras.optimizers.Adagrad(0.1), "mse")
    return model


def dynamic(optimizer: Any = None, **options: Any) -> keras.Model:
    return compiled(DynamicEmbedding(DIM, embeddings_initializer=UNIFORM, name="ids", **options), optimizer)


def fixed(optimizer: Any) -> keras.Model:
    """A table whose rows begin as those of the ids."""

    def rows(shape: Any, dtype: Any = None) -> tf.Tensor:
        drawn = RowInitializer(keras.initializers.get(UNIFORM))
        return drawn.rows(tf.fill([KNOWN], tf.constant(3, tf.int64)), tf.constant(ids_of(range(KNOWN))), DIM, dtype)

    return compiled(kdist.layers.Embedding(KNOWN, DIM, embeddings_initializer=rows), optimizer)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1), marks=pytest.mark.long),
        lambda: keras.optimizers.Adagrad(0.1),
        pytest.param(lambda: keras.optimizers.AdamW(0.01, use_ema=True), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.RMSprop(0.01), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Ftrl(0.1), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Adadelta(1.0), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Adamax(0.01), marks=pytest.mark.long),
        pytest.param(lambda: keras.optimizers.Lion(0.001), marks=pytest.mark.long),
    ],
    ids=["sgd", "adagrad", "adamw", "rmsprop", "ftrl", "adadelta", "adamax", "lion"],
)
def test_it_trains_as_a_fixed_table(optimizer: Callable[[], keras.optimizers.Optimizer], tmp_path: Path) -> None:
    x, y = data()
    expected = kdist.Trainer(fixed(optimizer()), run_dir=tmp_path / "fixed")
    expected.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    trainer = kdist.Trainer(dynamic(optimizer()), run_dir=tmp_path / "dynamic")
    trainer.fit(ids_of(x), y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    layer = trainer.model.get_layer("ids")
    np.testing.assert_array_equal(layer.ids, ids_of(np.arange(KNOWN)))
    np.testing.assert_allclose(layer.rows, expected.model.layers[1].get_weights()[0], rtol=1e-5, atol=1e-6)
    ours = trainer.model.predict(ids_of(x), verbose=0)
    np.testing.assert_allclose(ours, expected.model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_validation_gives_no_rows_and_reads_zeros_for_other_ids(run_dir: Path) -> None:
    x, y = data()
    trainer = kdist.Trainer(dynamic(), run_dir=run_dir)
    history = trainer.fit(ids_of(x), y, batch_size=16, epochs=1, verbose=0, validation_data=(ids_of(x + 5), y))
    assert list(trainer.model.get_layer("ids").ids) == list(ids_of(np.arange(KNOWN)))
    model = compiled(layers.Embedding(KNOWN + 5, DIM))
    model.get_layer("out").set_weights(trainer.model.get_layer("out").get_weights())
    model.layers[1].set_weights([np.concatenate([trainer.model.get_layer("ids").rows, np.zeros((5, DIM))])])
    assert history.history["val_loss"][-1] == pytest.approx(model.evaluate(x + 5, y, verbose=0), rel=1e-5)


@pytest.mark.long
def test_several_layers_lookups_and_kinds_of_ids_train_together(run_dir: Path) -> None:
    words = tf.ragged.constant([["a", "b"], [], ["c"], ["a", ""]] * 8)
    numbers = np.tile([[1, 2], [3, 1], [2, 2], [9, 0]], (8, 1)).astype(np.int32)
    y = np.arange(32, dtype=np.float32)[:, None]

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.words = DynamicEmbedding(DIM, "string", combiner="mean", mask_zero=True, name="words")
            self.numbers = DynamicEmbedding(DIM, combiner="sum", name="numbers")
            self.others = DynamicEmbedding(DIM, name="others")
            self.out = layers.Dense(1)

        def call(self, x: Any) -> Any:
            vectors = self.words(x["words"]), self.numbers(x["numbers"]), self.others(x["numbers"][:, 0])
            return self.out(keras.ops.concatenate([*vectors, self.others(x["numbers"][:, 1])], -1))

    model = Model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    batches = tf.data.Dataset.from_tensor_slices(({"words": words, "numbers": numbers}, y)).batch(8)
    trainer = kdist.Trainer(model, run_dir=run_dir)
    first = trainer.fit(batches, epochs=5, verbose=0)
    assert first.history["loss"][-1] < first.history["loss"][0]
    assert list(model.numbers.ids) == list(model.others.ids) == [0, 1, 2, 3, 9]
    assert set(model.words.ids) == set(model.words.as_keys(tf.constant(["a", "b", "c", ""])).numpy())


class Mask(layers.Layer):
    def call(self, x: Any, mask: Any = None) -> Any:
        return mask


@pytest.mark.parametrize(("key_dtype", "ids"), [("int64", [[1, 0], [2, 3]]), ("string", [["a", ""], ["b", "c"]])])
def test_padding_is_masked_in_a_functional_model(key_dtype: Any, ids: list[Any]) -> None:
    inputs = keras.Input((2,), dtype=key_dtype)
    model = keras.Model(inputs, Mask()(DynamicEmbedding(DIM, key_dtype, mask_zero=True)(inputs)))
    assert model(tf.constant(ids)).numpy().tolist() == [[True, False], [True, True]]


def test_a_run_resumes_and_the_checkpoint_is_one_of_tensorflow(run_dir: Path) -> None:
    x, y = data()
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    for steps in (5, 12):
        trainer = kdist.Trainer(lambda: dynamic(keras.optimizers.Adam(0.01)), run_dir=run_dir)
        trainer.fit(ids_of(x), y, steps=steps, **options)
    whole = kdist.Trainer(dynamic(keras.optimizers.Adam(0.01)), run_dir=run_dir.with_name("whole"))
    whole.fit(ids_of(x), y, steps=12, **options)
    np.testing.assert_allclose(trainer.model.get_layer("ids").rows, whole.model.get_layer("ids").rows, atol=1e-7)
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "ckpt-12"))
    ids = reader.get_tensor("parameters/ids/embeddings_ids")
    assert sorted(ids) == list(ids_of(np.arange(KNOWN)))
    rows = reader.get_tensor("parameters/ids/embeddings")[np.argsort(ids)]
    np.testing.assert_array_equal(rows, trainer.model.get_layer("ids").rows)
    assert reader.get_tensor("slots/ids/embeddings/momentum").shape == (KNOWN, DIM)
    assert reader.get_tensor("state/ids/embeddings_last_steps").max() == 11
    assert reader.get_tensor("state/ids/embeddings_counts").min() > 1


@pytest.mark.long
def test_a_model_with_rows_is_trained_from_them(tmp_path: Path) -> None:
    x, y = data()
    model = dynamic(keras.optimizers.SGD(0.0))
    rows = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
    model.get_layer("ids").set_rows(ids_of([2, 0, 50]), rows)
    kdist.Trainer(model, run_dir=tmp_path).fit(ids_of(x), y, batch_size=16, epochs=1, verbose=0)
    layer = model.get_layer("ids")
    assert list(layer.ids) == list(ids_of([*range(KNOWN), 50]))
    np.testing.assert_array_equal(layer.rows[[2, 0, KNOWN]], rows)


@pytest.mark.long
def test_saved_and_exported_models_have_the_rows(run_dir: Path) -> None:
    x, y = data()
    trainer = kdist.Trainer(
        dynamic(admission=Admission(min_count=2), eviction=Eviction(max_rows=15)),
        run_dir=run_dir,
        hooks=[kdist.hooks.Export()],
    )
    trainer.fit(ids_of(x), y, batch_size=16, epochs=2, verbose=0)
    model, some = trainer.model, ids_of([[0, 1, 2], [3, 77, 5]])
    assert 0 < len(model.get_layer("ids").ids) <= 15
    expected = model.predict(some, verbose=0)
    loaded = keras.models.load_model(run_dir / "model.keras")
    np.testing.assert_array_equal(loaded.predict(some, verbose=0), expected)
    assert loaded.get_layer("ids").admission == Admission(min_count=2)
    assert loaded.get_layer("ids").eviction == Eviction(max_rows=15)
    program = (
        "import sys; sys.modules['kdist'] = None\n"
        "import numpy as np, tensorflow as tf\n"
        f"model = tf.saved_model.load({str(run_dir / 'saved_model')!r})\n"
        f"served = model.serve(tf.constant({some.tolist()}, tf.int64))\n"
        f"np.testing.assert_allclose(served, {expected.tolist()}, rtol=1e-6)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Admission(min_count=0), "min_count=0: must be a whole number from 1"),
        (lambda: Admission(probability=0.0), "probability=0.0: must be more than 0"),
        (Eviction, "at least one of unseen_steps"),
        (lambda: Eviction(max_rows=1.5), "max_rows=1.5: must be a whole number, and more than 0"),
        (lambda: DynamicEmbedding(DIM, admission="always"), "admission='always': must be kdist.layers.Admission"),
        (lambda: Eviction(max_rows=0), "max_rows=0: must be a whole number, and more than 0"),
        (lambda: DynamicEmbedding(DIM, "int32"), "key_dtype='int32': must be 'int64' or 'string'"),
        (lambda: DynamicEmbedding(0), "output_dim=0: must be a whole number"),
        (lambda: DynamicEmbedding(DIM, embeddings_initializer="glorot_uniform"), "GlorotUniform depends on how many"),
        (lambda: DynamicEmbedding(DIM)(tf.constant(["a"])), "key_dtype='int64', but the ids are string"),
        (lambda: DynamicEmbedding(DIM, "string")(tf.constant([1])), "key_dtype='string', but the ids are int32"),
        (lambda: dynamic().layers[1].set_rows(np.array([1, 1]), np.zeros((2, DIM))), "id 1 has more than one row"),
        (lambda: dynamic().layers[1].set_rows(np.array([1]), np.zeros((2, DIM))), r"must have \[n\] and"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


class OwnStep(keras.Model):
    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch)


def with_own_step() -> keras.Model:
    model = dynamic()
    own = OwnStep(model.inputs, model.outputs)
    own.compile("sgd", "mse")
    return own


def frozen() -> keras.Model:
    model = dynamic()
    model.get_layer("ids").trainable = False
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (with_own_step, {}, "ids has no rows to train: the model's own train_step"),
        (frozen, {}, "ids has no rows to train: it is frozen"),
        (
            lambda: dynamic(keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2)),
            {},
            "ema_overwrite_frequency is for whole variables",
        ),
        (lambda: dynamic(keras.optimizers.Adafactor()), {}, "Adafactor does not treat each element by itself"),
        (dynamic, {"strategy": "mirrored", "devices": 2}, "strategy=mirrored: every replica has a copy"),
        (dynamic, {"cluster": "2w"}, "strategy=multi_worker_mirrored: every replica has a copy"),
    ],
)
def test_it_is_refused_where_rows_could_not_be_trained(
    model: Callable[[], keras.Model], options: dict[str, Any], message: str, run_dir: Path
) -> None:
    with pytest.raises(kdist.ConfigError, match=message):
        kdist.Trainer(model, run_dir=run_dir, **options).fit(ids_of(data()[0]), data()[1], batch_size=16, verbose=0)


def test_rows_cannot_be_written_from_a_session(run_dir: Path) -> None:
    trainer = kdist.Trainer(dynamic(), run_dir=run_dir)
    with trainer.session(ids_of(data()[0]), data()[1], batch_size=16, steps=2) as session:
        session.run()
        found = session.read(["parameters/ids/embeddings", "parameters/ids/embeddings_ids"])
        assert len(found["parameters/ids/embeddings"]) == len(found["parameters/ids/embeddings_ids"]) > 0
        with pytest.raises(kdist.ConfigError, match="rows come from ids alone"):
            session.write({"parameters/ids/embeddings": np.zeros((1, DIM))})


def test_options_may_be_dicts() -> None:
    layer = DynamicEmbedding(DIM, admission={"min_count": 3}, eviction={"max_rows": 5})
    assert (layer.admission, layer.eviction) == (Admission(min_count=3), Eviction(max_rows=5))


def test_a_callback_that_keeps_weights_only_is_refused(run_dir: Path) -> None:
    keeps = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    with pytest.raises(kdist.ConfigError, match="has a DynamicEmbedding, whose rows are no weights; kdist.hooks"):
        kdist.Trainer(dynamic(), run_dir=run_dir).fit(ids_of(data()[0]), data()[1], verbose=0, callbacks=[keeps])


def test_the_best_rows_come_back(run_dir: Path) -> None:
    x, y = data()
    stop = kdist.hooks.EarlyStopping("loss", patience=0, restore_best=True)
    # What is learned of these examples makes others worse.
    others = ids_of(x), -y
    # The sooner or the later, which depends on the initial rows.
    keras.utils.set_random_seed(0)
    trainer = kdist.Trainer(dynamic(keras.optimizers.SGD(0.5)), run_dir=run_dir, hooks=[stop], seed=0)
    history = trainer.fit(ids_of(x), y, batch_size=16, epochs=6, verbose=0, validation_data=others)
    validated = history.history["val_loss"]
    assert 2 <= len(validated) < 6
    best = min(validated)
    assert validated[-2] == best < validated[-1]
    assert trainer.model.evaluate(*others, verbose=0) == pytest.approx(best, rel=1e-5)
