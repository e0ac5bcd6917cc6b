"""Replicas exchange few tensors, clipped as Keras clips gradients."""

from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import toy_data

import kdist
from kdist.config.schema import MirroredOptions
from kdist.model.optimizer import clip_gradients
from kdist.parameters.aggregation import finished
from kdist.parameters.store import ParameterStore
from kdist.strategies import all_reduce
from kdist.strategies.mirrored import Mirrored
from kdist.strategies.prepared_training import prepare


def store_of(optimizer: keras.optimizers.Optimizer, run_dir: Path, *, is_replicated: bool = True) -> ParameterStore:
    trainer = kdist.Trainer(models.mlp(optimizer), run_dir=run_dir)
    request = trainer._fit_of(*toy_data(), batch_size=8, shuffle=False)
    training = prepare(request.training_spec(request.training_data), 2)
    device = "/job:localhost/task:0/device:CPU:0"
    return training.store([device], training.plan_for_one(), is_replicated=is_replicated)


@pytest.mark.parametrize(("is_replicated", "number"), [(True, 1), (False, 4)])
def test_parameters_that_are_treated_alike_are_exchanged_as_one(
    is_replicated: bool, number: int, run_dir: Path
) -> None:
    store = store_of(keras.optimizers.Adam(), run_dir, is_replicated=is_replicated)
    assert len(store.blocks.shards) == 4
    assert sum(block.is_parameter for block in store.blocks) == number


CLIPPINGS = [{kind: limit} for kind in ("clipnorm", "global_clipnorm", "clipvalue") for limit in (0.1, -1.0)]


@pytest.mark.parametrize("clipping", [*CLIPPINGS, {}], ids=str)
def test_mean_gradients_are_clipped_as_by_keras(clipping: dict[str, float], run_dir: Path) -> None:
    optimizer = keras.optimizers.SGD(**clipping)
    store = store_of(optimizer, run_dir)
    rng = np.random.default_rng(0)
    shapes = [store.blocks.shape_of(shard) for shard in range(len(store.blocks.shards))]
    gradients = [tf.constant(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    changes = {0: store.blocks.join(0, dict(enumerate(gradients)))}
    found = store.blocks.split(0, finished(store, changes, 2, phase=0)[0])
    expected = optimizer._clip_gradients(gradients)
    for shard, gradient in enumerate(expected):
        np.testing.assert_allclose(found[shard], gradient, rtol=1e-6)


@pytest.mark.parametrize("clipping", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.01}], ids=str)
@pytest.mark.parametrize("broken", [np.inf, np.nan])
def test_gradients_that_are_no_numbers_are_clipped_as_by_keras(clipping: dict[str, float], broken: float) -> None:
    optimizer = keras.optimizers.SGD(**clipping)
    gradients = [tf.constant([1.0, broken, 3.0]), tf.constant([4.0, 5.0])]
    found = clip_gradients(optimizer, dict(enumerate(gradients)))
    for number, gradient in enumerate(optimizer._clip_gradients(gradients)):
        np.testing.assert_allclose(found[number], gradient, rtol=1e-6)


def test_the_norm_of_gradients_of_several_dtypes_is_that_of_all() -> None:
    gradients = {0: tf.constant([3.0]), 1: tf.constant([4.0], tf.float64)}
    found = clip_gradients(keras.optimizers.SGD(global_clipnorm=1.0), gradients)
    np.testing.assert_allclose([found[0].numpy()[0], found[1].numpy()[0]], [0.6, 0.8], rtol=1e-6)
    assert (found[0].dtype, found[1].dtype) == (tf.float32, tf.float64)


@pytest.mark.parametrize("num_tables", [2, 5])
def test_rows_of_tables_of_one_width_are_exchanged_as_one(
    num_tables: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = keras.layers.Input((num_tables + 1,), dtype="int32")
    sizes = [(50 + i, 4) for i in range(num_tables)] + [(50, 3)]
    vectors = [keras.layers.Embedding(*size)(ids[:, i]) for i, size in enumerate(sizes)]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(vectors)))
    model.compile("sgd", "mse")
    exchanged: list[int] = []
    reduce = all_reduce.all_reduce

    def noted(replica: Any, how: Any, value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            exchanged.append(value.values.shape[-1])
        return reduce(replica, how, value)

    monkeypatch.setattr(all_reduce, "all_reduce", noted)
    request = kdist.Trainer(model, run_dir=run_dir)._fit_of(np.zeros((8, num_tables + 1)), np.zeros(8), batch_size=4)
    strategy = Mirrored(options=MirroredOptions(devices=1))
    strategy.start(request.training_spec(request.training_data))
    strategy.call(1)
    assert sorted(exchanged) == [3, 4]
