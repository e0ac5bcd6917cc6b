"""Embedding layers on ragged, sparse and padded ids, pooled and not. In one process, compared with TensorFlow."""

from __future__ import annotations

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
from kdist.layers.pooling import COMBINERS
from kdist.model.replica_step import ReplicaStep
from kdist.strategies.prepared_training import prepare

ROWS, DIM = 12, 3

#: Ids and weights of four examples; the second has none.
IDS = [[3, 1, 3], [], [7], [5, 2]]
WEIGHTS = [[0.5, 2.0, 1.0], [], [3.0], [0.25, 1.5]]


def ragged() -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
    return tf.ragged.constant(IDS, tf.int64), tf.ragged.constant(WEIGHTS, tf.float32)


def sparse() -> tuple[tf.SparseTensor, tf.SparseTensor]:
    ids, weights = ragged()
    return ids.to_sparse(), weights.to_sparse()


def padded() -> tuple[tf.Tensor, tf.Tensor]:
    ids, weights = ragged()
    return ids.to_tensor(), weights.to_tensor(9.0)


KINDS = [ragged, sparse, padded]


def layer_for(kind: Any, combiner: str | None = None, **arguments: Any) -> Embedding:
    return Embedding(ROWS, DIM, mask_zero=kind is padded, combiner=combiner, **arguments)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_pooled_vectors_and_gradients_are_those_of_tensorflow(kind: Any, combiner: str, is_weighted: bool) -> None:
    layer = layer_for(kind, combiner)
    given = kind() if is_weighted else kind()[:1]
    with tf.GradientTape() as tape:
        pooled = layer(*given)
        loss = tf.reduce_sum(pooled**2)
    ours = tape.gradient(loss, layer.trainable_variables)
    table = tf.Variable(layer.get_weights()[0])
    with tf.GradientTape() as tape:
        ids, weights = sparse()
        expected = tf.nn.safe_embedding_lookup_sparse([table], ids, weights if is_weighted else None, combiner)
        # It gives zeros where there is nothing to pool.
        loss = tf.reduce_sum(expected**2)
    theirs = tape.gradient(loss, [table])
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    assert not pooled[1].numpy().any()
    for own, other in zip(ours, theirs):
        np.testing.assert_allclose(tf.convert_to_tensor(own), tf.convert_to_tensor(other), rtol=1e-5, atol=1e-6)


def test_without_a_combiner_ragged_ids_give_ragged_vectors() -> None:
    layer, (ids, _) = Embedding(ROWS, DIM), ragged()
    vectors = layer(ids)
    assert isinstance(vectors, tf.RaggedTensor)
    assert vectors.shape.as_list() == [4, None, DIM]
    np.testing.assert_array_equal(vectors.flat_values, layer.get_weights()[0][ids.flat_values])


def test_only_the_last_dimension_is_pooled() -> None:
    ids = tf.ragged.constant([[[1, 2], [3]], [], [[4]]], tf.int64)
    layer = Embedding(ROWS, DIM, combiner="mean")
    pooled, table = layer(ids), layer.get_weights()[0]
    assert pooled.shape.as_list() == [3, None, DIM]
    np.testing.assert_allclose(pooled.flat_values, [table[[1, 2]].mean(0), table[3], table[4]], rtol=1e-6)
    np.testing.assert_allclose(layer(np.array([[[1, 2], [3, 3]]]))[0], pooled[0], rtol=1e-6)


def test_half_precision_is_added_up_in_single_precision() -> None:
    layer = Embedding(ROWS, DIM, combiner="sum", embeddings_initializer="ones", dtype="mixed_float16")
    pooled = layer(tf.RaggedTensor.from_row_lengths(tf.ones([5000], tf.int64), [5000]))
    assert pooled.dtype == tf.float16
    np.testing.assert_array_equal(pooled, np.full([1, DIM], 5000, np.float16))


def test_a_quantized_layer_pools() -> None:
    layer, (ids, weights) = Embedding(ROWS, DIM, combiner="mean"), ragged()
    before = layer(ids, weights)
    layer.quantize("int8", type_check=False)
    np.testing.assert_allclose(layer(ids, weights), before, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        ({"combiner": "max"}, lambda: (), "combiner='max': must be 'sum', 'mean', 'sqrtn' or None"),
        ({"combiner": "mean"}, lambda: ([1, 2],), r"'mean' pools the ids of each example, but ids of shape \(2,\)"),
        ({}, lambda: sparse()[:1], "sparse ids have no vectors .* give the layer a combiner: 'sum', 'mean', 'sqrtn'"),
        ({}, ragged, "weights are for pooling; give the layer a combiner"),
        ({"combiner": "sum"}, lambda: (ragged()[0], padded()[1]), "the ids are ragged, but the weights dense"),
        ({"combiner": "sum"}, lambda: ([[1, 2]], [[1.0]]), r"weights have the shape \(1, 1\), and the ids \(1, 2\)"),
        ({"combiner": "sum"}, lambda: (tf.sparse.expand_dims(sparse()[0], 0),), r"must have \[batch, k\]"),
    ],
)
def test_what_cannot_be_pooled_is_refused(arguments: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Embedding(ROWS, DIM, **arguments)(*(np.array(item) if isinstance(item, list) else item for item in given()))


def test_weights_of_other_examples_than_the_ids_are_refused() -> None:
    ids, weights = ragged()
    other = tf.RaggedTensor.from_row_lengths(weights.flat_values, [2, 1, 1, 2])
    for given in [(ids, other), (ids.to_sparse(), other.to_sparse())]:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            Embedding(ROWS, DIM, combiner="sum")(*given)


class Model(keras.Model):
    """Takes ids alone, or with weights; two features share a table."""

    def __init__(self, combiner: str, *, mask_zero: bool = False) -> None:
        super().__init__()
        self.embedding = Embedding(ROWS, DIM, combiner=combiner, mask_zero=mask_zero)
        self.out = layers.Dense(1)

    def get_config(self) -> dict[str, Any]:
        return {"combiner": self.embedding.combiner, "mask_zero": self.embedding.mask_zero}

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self.out(self.embedding(inputs["ids"], inputs["weights"]) + self.embedding(inputs["others"]))
        return self.out(self.embedding(inputs))


def functional(kind: Any, embedding: layers.Layer) -> keras.Model:
    inputs = {
        name: layers.Input((None,), dtype=dtype, name=name, ragged=kind is ragged, sparse=kind is sparse)
        for name, dtype in {"ids": "int64", "weights": "float32", "others": "int64"}.items()
    }
    pooled = embedding(inputs["ids"], inputs["weights"]) + embedding(inputs["others"])
    assert pooled.shape == (None, DIM)
    return keras.Model(inputs, layers.Dense(1)(pooled))


def compiled(model: keras.Model, optimizer: str = "sgd") -> keras.Model:
    model.compile(optimizer, "mse", weighted_metrics=["mae"])
    return model


def dataset(kind: Any, num_batches: int = 5) -> tf.data.Dataset:
    """Batches of 8 examples with sample weights."""
    rng = np.random.default_rng(2)

    def of_kind(values: tf.RaggedTensor) -> Any:
        return values.to_sparse() if kind is sparse else values.to_tensor() if kind is padded else values

    def column(lengths: np.ndarray) -> tf.RaggedTensor:
        ids = rng.integers(1, ROWS, lengths.sum())
        return tf.RaggedTensor.from_row_lengths(ids, lengths)

    ids = column(rng.integers(0, 4, num_batches * 8))
    weights = ids.with_flat_values(rng.uniform(0.5, 2, ids.flat_values.shape).astype(np.float32))
    x = {"ids": ids, "weights": weights, "others": column(rng.integers(0, 3, num_batches * 8))}
    y, sample_weight = (rng.uniform(size=(num_batches * 8, 1)).astype(np.float32) for _ in range(2))
    return (
        tf.data.Dataset.from_tensor_slices((x, y, sample_weight))
        .batch(8)
        .map(lambda x, *rest: ({name: of_kind(values) for name, values in x.items()}, *rest))
    )


@pytest.mark.parametrize("is_functional", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", in_short(KINDS, [ragged]), ids=lambda kind: kind.__name__)
def test_models_train_evaluate_and_predict_as_by_keras(kind: Any, is_functional: bool, run_dir: Path) -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(4)
        if is_functional:
            return compiled(functional(kind, layer_for(kind, "sqrtn")))
        return compiled(Model("sqrtn", mask_zero=kind is padded))

    data, expected = dataset(kind), make()
    expected.fit(data, epochs=2, verbose=0)
    trainer = kdist.Trainer(make, run_dir=run_dir)
    trainer.fit(data, epochs=2, verbose=0)
    for ours, theirs in zip(trainer.model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    logs = expected.evaluate(data, return_dict=True, verbose=0)
    assert trainer.evaluate(data, verbose=0, return_dict=True) == pytest.approx(logs, rel=1e-5)
    np.testing.assert_allclose(trainer.predict(data, verbose=0), expected.predict(data, verbose=0), rtol=1e-5)


class Averaged(keras.Model):
    """Pools by itself what Keras's layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = layers.Embedding(ROWS, DIM), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.out(tf.reduce_sum(self.embedding(inputs["ids"]), 1))


@pytest.mark.long
def test_keras_own_layer_is_looked_up_by_rows_too(run_dir: Path) -> None:
    for kind in (ragged, sparse):

        def make() -> keras.Model:
            keras.utils.set_random_seed(4)
            return compiled(Averaged())

        data, expected = dataset(kind), make()
        expected.fit(data, verbose=0)
        trainer = kdist.Trainer(make, run_dir=run_dir / kind.__name__)
        trainer.fit(data, verbose=0)
        for ours, theirs in zip(trainer.model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def step_of(model: keras.Model, data: tf.data.Dataset, run_dir: Path) -> ReplicaStep:
    request = kdist.Trainer(lambda: compiled(model), run_dir=run_dir)._fit_of(data)
    return prepare(request.training_spec(request.training_data), 1).replica_step


@pytest.mark.parametrize("kind", in_short(KINDS, KINDS[:1]), ids=lambda kind: kind.__name__)
def test_all_rows_are_fetched_at_once_and_no_table_is_needed_whole(kind: Any, run_dir: Path) -> None:
    step = step_of(Model("mean", mask_zero=kind is padded), dataset(kind), run_dir)
    assert not step.whole_tables
    assert len(step._lookups._rounds) == 1
    for own in (ragged, sparse):
        assert not step_of(Averaged(), dataset(own), run_dir).whole_tables


def test_a_wrong_ragged_id_is_named_with_its_table(run_dir: Path) -> None:
    ids = tf.ragged.constant([[1, 2], [], [ROWS]], tf.int64)
    data = tf.data.Dataset.from_tensors((ids, np.zeros([3, 1], np.float32)))
    trainer = kdist.Trainer(lambda: compiled(Model("sum")), run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=rf"id {ROWS} is not in table .*embeddings, .* 0 to {ROWS - 1}$"):
        trainer.fit(data, verbose=0)


def test_a_pooling_layer_stays_kdists_in_a_saved_model(run_dir: Path) -> None:
    trainer = kdist.Trainer(
        lambda: compiled(functional(ragged, Embedding(ROWS, DIM, combiner="mean"))), run_dir=run_dir
    )
    trainer.fit(dataset(ragged), verbose=0)
    loaded = keras.saving.load_model(run_dir / "model.keras")
    (layer,) = (layer for layer in loaded.layers if isinstance(layer, layers.Embedding))
    assert type(layer) is Embedding
    assert layer.combiner == "mean"
    x = next(iter(dataset(ragged)))[0]
    np.testing.assert_array_equal(loaded(x), trainer.model(x))


@pytest.mark.parametrize("kind", ["padded", "ragged", "sparse"])
def test_weights_that_are_no_numbers_are_named(kind: str) -> None:
    layer = Embedding(ROWS, DIM, combiner="mean", name="table")
    ids, weights = tf.constant([[1, 2]]), tf.constant([[1.0, np.nan]])
    if kind == "ragged":
        ids, weights = tf.RaggedTensor.from_tensor(ids), tf.RaggedTensor.from_tensor(weights)
    elif kind == "sparse":
        ids, weights = tf.sparse.from_dense(ids), tf.sparse.from_dense(weights)
    with pytest.raises(tf.errors.InvalidArgumentError, match="layer table: the weights"):
        layer(ids, weights)
