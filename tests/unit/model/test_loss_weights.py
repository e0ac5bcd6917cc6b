"""The kinds of a loss's terms, which say how the losses of synchronous replicas make one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, needs_keras_3_13
from keras import layers, ops

import kdist
from kdist.model.loss_weights import REPEATS, Term, kinds_of, make_batch, repeat
from kdist.model.replica_step import ReplicaStep
from kdist.strategies.prepared_training import prepare


def summed(y: Any, y_pred: Any) -> Any:
    return ops.sum((y - y_pred) ** 2)


def averaged(y: Any, y_pred: Any) -> Any:
    return ops.mean((y - y_pred) ** 2)


class AddsLoss(layers.Layer):
    def __init__(self, reduce: Callable[[Any], Any]) -> None:
        super().__init__()
        self._reduce = reduce

    def call(self, x: Any) -> Any:
        self.add_loss(self._reduce(x**2))
        return x


def model_of(loss: Any, *more: layers.Layer, kind: type[keras.Model] = keras.Model, **options: Any) -> keras.Model:
    inputs = keras.Input((3,))
    x = layers.Dense(1, **options)(inputs)
    for layer in more:
        x = layer(x)
    model = kind(inputs, x)
    model.compile(keras.optimizers.SGD(), loss)
    return model


def step_of(
    model: keras.Model, run_dir: Path, *, same_size: bool = False, data: tf.data.Dataset | None = None
) -> ReplicaStep:
    if data is None:
        data = tf.data.Dataset.from_tensor_slices((np.ones((8, 3), "float32"), np.ones((8, 1), "float32")))
    trainer = kdist.Trainer(lambda: model, run_dir=run_dir)
    request = trainer._fit_of(data.batch(4, drop_remainder=same_size))
    return prepare(request.training_spec(request.training_data), 2, 2).replica_step


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (lambda: model_of("mse"), Term.MEAN),
        (lambda: model_of(averaged, kernel_regularizer="l2"), Term.MEAN),
        (lambda: model_of("mse", AddsLoss(ops.mean)), Term.MEAN),
        (lambda: model_of("mse", layers.Dropout(0.5)), Term.MEAN),
        (lambda: model_of(averaged, layers.Dropout(0.5)), Term.MEAN),
        (lambda: model_of(keras.losses.MeanSquaredError(reduction="sum")), Term.SUM),
        (lambda: model_of(keras.losses.MeanSquaredError(reduction=None)), Term.SUM),
        (lambda: model_of(summed), Term.SUM),
        (lambda: model_of(summed, layers.Dropout(0.5)), Term.SUM),
        (lambda: model_of(summed, AddsLoss(ops.sum), kernel_regularizer="l2"), Term.SUM),
    ],
)
def test_a_loss_is_a_mean_or_a_sum_by_what_it_does(model: Callable[[], keras.Model], kind: Term, run_dir: Path) -> None:
    assert step_of(model(), run_dir).updates.loss is kind


def test_draws_that_agree_by_chance_do_not_make_a_sum_unknown() -> None:
    def values(batch: tf.Tensor, draw: int) -> list[float]:
        sizes = {4: [4.0, 5.0, 17.0], 16: [16.0, 16.0, 0.0], 64: [0.0, 0.0, 70.0]}
        return [sizes[batch.shape[0]][draw]]

    assert kinds_of(values, tf.TensorSpec([4, 1]), model_of("mse")) == [Term.SUM]


def test_regularizers_count_once_beside_a_sum(run_dir: Path) -> None:
    step = step_of(model_of(summed, kernel_regularizer="l2"), run_dir)
    assert step._terms.added == (Term.CONSTANT,)
    assert step._terms.added_factors == (0.5,)


def test_a_sum_beside_a_mean_needs_batches_of_one_size(run_dir: Path) -> None:
    def model() -> keras.Model:
        return model_of("mse", AddsLoss(ops.sum))

    step = step_of(model(), run_dir / "same", same_size=True)
    assert step.updates.loss is Term.MEAN
    assert step._terms.added_factors == (2.0,)
    with pytest.raises(kdist.ConfigError, match="drop_remainder=True"):
        step_of(model(), run_dir / "other")


class OfTable(keras.Model):
    """Adds a sum of what it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.adds, self.out = layers.Embedding(9, 2), AddsLoss(ops.sum), layers.Dense(1)

    def call(self, ids: Any) -> Any:
        ids = ids.to_tensor(shape=(None, 3)) if isinstance(ids, tf.RaggedTensor) else ids
        return self.out(ops.mean(self.adds(self.table(ids)), 1))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_sum_of_rows_of_a_table_is_a_sum(is_ragged: bool, run_dir: Path) -> None:
    ids = tf.ragged.constant([[1, 2, 3], [4], [5, 6], [7]] * 2) if is_ragged else np.ones((8, 3), "int32")
    model = OfTable()
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones((8, 1), "float32")))
    step = step_of(model, run_dir, same_size=True, data=data)
    assert step.updates.loss is Term.MEAN
    assert step._terms.added_factors == (2.0,)


class OwnStep(keras.Model):
    """A `train_step` with a loss for the batches of all replicas, and maybe with a regularizer beside it."""

    l2 = 0.0

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            each = tf.reduce_mean((self(x, training=True) - y) ** 2, -1)
            loss = tf.nn.compute_average_loss(each, global_batch_size=8)
            loss += self.l2 * tf.reduce_sum(self.trainable_variables[0] ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "size": tf.reduce_mean(x)}


class RegularizedOwnStep(OwnStep):
    l2 = 0.1


def test_gradients_of_a_train_step_that_divides_by_all_examples_add_up(run_dir: Path) -> None:
    step = step_of(model_of("mse", kind=OwnStep), run_dir)
    assert step.updates.loss is Term.SUM
    assert step.returned.sums == {"loss"}


def test_a_train_step_that_neither_sums_nor_averages_is_refused(run_dir: Path) -> None:
    with pytest.raises(kdist.ConfigError, match="neither a mean nor a sum"):
        step_of(model_of("mse", kind=RegularizedOwnStep), run_dir)


def test_statistics_of_all_replicas_are_refused_with_a_mask_too_but_not_when_frozen(run_dir: Path) -> None:
    def model(*, trainable: bool) -> keras.Model:
        norm = layers.BatchNormalization(synchronized=True, name="norm", trainable=trainable)
        return model_of("mse", layers.Masking(), norm)

    with pytest.raises(kdist.ConfigError, match=r"BatchNormalization norm \(synchronized=True"):
        step_of(model(trainable=True), run_dir)
    step_of(model(trainable=False), run_dir)


def test_statistics_of_all_replicas_are_refused_by_name(run_dir: Path) -> None:
    norm = layers.BatchNormalization(synchronized=True, name="norm")
    with pytest.raises(kdist.ConfigError, match=r"BatchNormalization norm \(synchronized=True"):
        step_of(model_of("mse", norm), run_dir / "trained")
    norm.trainable = False
    step_of(model_of("mse", norm), run_dir / "frozen")


class TakesOptional(keras.Model):
    """Of an input, and one that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        x, optional = inputs["x"], inputs["optional"]
        return self.dense(x if optional is None else x + optional)


@needs_keras_3_13
@pytest.mark.parametrize("loss", ["mse", summed])
def test_an_optional_input_may_be_none_and_the_first(loss: Any, run_dir: Path) -> None:
    model = TakesOptional()
    model.compile("sgd", loss)
    trainer = kdist.Trainer(lambda: model, run_dir=run_dir)
    request = trainer._fit_of({"optional": None, "x": np.ones((6, 3))}, np.ones((6, 1)), batch_size=4)
    weights = prepare(request.training_spec(request.training_data), 2, 2).replica_step.updates.loss
    assert weights is (Term.MEAN if loss == "mse" else Term.SUM)


def test_a_loss_that_takes_no_made_up_data_counts_as_a_mean_with_a_warning(run_dir: Path) -> None:
    def only_of_ones(y: Any, y_pred: Any) -> Any:
        tf.debugging.assert_equal(y, tf.ones_like(y))
        return averaged(y, y_pred)

    with pytest.warns(UserWarning, match="its loss could not be tried on made-up data and counts as a mean"):
        step = step_of(model_of(only_of_ones), run_dir)
    assert step.updates.loss is Term.MEAN


def test_made_up_strings_are_strings() -> None:
    batch = make_batch(tf.TensorSpec([None, 2], tf.string), 1)
    assert set(batch.numpy().ravel()) <= {b"0", b"1"}


def rooted(y: Any, y_pred: Any) -> Any:
    return ops.sqrt(ops.mean((y - y_pred) ** 2))


def contrasted(y: Any, y_pred: Any) -> Any:
    return ops.mean((y_pred - ops.mean(y_pred, 0)) ** 2)


def crossed(y: Any, y_pred: Any) -> Any:
    """Grows with the logarithm of the number of examples, as the loss of a retrieval with in-batch negatives."""
    return ops.logsumexp(y_pred) - ops.mean(y * y_pred)


@pytest.mark.parametrize("loss", [rooted, contrasted, crossed])
def test_a_loss_that_examples_make_together_is_computed_by_each_replica_with_a_warning(
    loss: Any, run_dir: Path
) -> None:
    with pytest.warns(UserWarning, match="its loss is neither a mean nor a sum over the examples of a batch"):
        step = step_of(model_of(loss), run_dir)
    assert step.updates.loss is Term.MEAN


@pytest.mark.filterwarnings("error:.*neither a mean nor a sum")
@pytest.mark.parametrize("loss", in_short([summed, averaged], {averaged}))
@pytest.mark.parametrize(
    "layer", [layers.ReLU, lambda: AddsLoss(ops.mean), layers.BatchNormalization, lambda: layers.Dropout(0.5)]
)
def test_other_losses_make_no_warning(loss: Any, layer: Callable[[], layers.Layer], run_dir: Path) -> None:
    step_of(model_of(loss, layer()), run_dir, same_size=True)


@pytest.mark.parametrize("spec", [tf.RaggedTensorSpec([None, None], tf.int64), tf.SparseTensorSpec([None, 3])])
def test_made_up_data_is_of_the_kind_of_the_data(spec: tf.TypeSpec) -> None:
    batch = make_batch({"x": spec}, 1)
    assert spec.is_compatible_with(batch["x"])
    assert repeat(batch)["x"].shape[0] == REPEATS * batch["x"].shape[0]
