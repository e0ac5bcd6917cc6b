"""`ModelSource` in another process: builds the model there, or brings the one that the user has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf

from kdist.data.pickling import dumps, loads
from kdist.errors import ConfigError
from kdist.model.names import variable_names
from kdist.model.source import ModelSource
from kdist.model.state import read_from_model


def elsewhere(source: ModelSource) -> keras.Model:
    """The model of another process."""
    return loads(dumps(source)).model


def built() -> keras.Model:
    return models.mlp(keras.optimizers.SGD(0.5))


def freeze(model: keras.Model) -> None:
    model.layers[0].trainable = False


def compile_again(model: keras.Model) -> None:
    model.compile(keras.optimizers.Adam(0.25), "sparse_categorical_crossentropy")


def test_another_process_builds_its_model() -> None:
    source = ModelSource(built, "test")
    source.model.set_weights([weight * 0 for weight in source.model.get_weights()])
    assert any(weight.any() for weight in elsewhere(source).get_weights())


@pytest.mark.parametrize("change", [freeze, compile_again])
def test_another_process_gets_a_model_that_was_changed_since(change: Callable[[keras.Model], None]) -> None:
    source = ModelSource(built, "test")
    change(source.model)
    there = elsewhere(source)
    assert [layer.trainable for layer in there.layers] == [layer.trainable for layer in source.model.layers]
    assert type(there.optimizer) is type(source.model.optimizer)
    assert float(there.optimizer.learning_rate) == float(source.model.optimizer.learning_rate)


def with_dropout() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model.compile("sgd", "mse", loss_weights=[1.0])
    return model


def test_another_process_gets_what_was_changed_of_layers_and_loss_weights() -> None:
    source = ModelSource(with_dropout, "test")
    source.model.layers[0].rate = 0.25
    assert elsewhere(source).layers[0].rate == 0.25
    source = ModelSource(with_dropout, "test")
    source.model.layers[1].enable_lora(1)
    here, there = (variable_names(m, m.trainable_variables) for m in (source.model, elsewhere(source)))
    assert here == there == ["dense/bias", "dense/lora_kernel_a", "dense/lora_kernel_b"]
    source = ModelSource(with_dropout, "test")
    source.model.compile(source.model.optimizer, source.model.loss, loss_weights=[3.0])
    assert elsewhere(source).get_compile_config()["loss_weights"] == [3.0]


def with_a_part() -> keras.Model:
    part = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)], name="part")
    part.trainable = False
    inputs = keras.layers.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2)(part(inputs)))
    model.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse")
    return model


def test_values_and_slots_of_a_part_have_the_same_names_in_another_process() -> None:
    source = ModelSource(with_a_part, "test")
    source.model.get_layer("part").trainable = True
    source.model.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse")
    source.model.optimizer.build(source.model.trainable_variables)
    there = elsewhere(source)
    assert read_from_model(there).keys() == read_from_model(source.model).keys()
    assert "slots/part/dense/kernel/momentum" in read_from_model(there)


class OfParts(keras.Model):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.part = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])
        self.last = keras.layers.Dense(2)

    def call(self, inputs: object) -> object:
        return self.last(self.part(inputs))


def of_parts() -> keras.Model:
    model = OfParts()
    model.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse")
    model.fit(tf.ones((2, 4)), tf.ones((2, 2)), verbose=0)
    return model


def test_another_process_gets_what_the_config_of_a_class_does_not_tell() -> None:
    keras.layers.Dense(1)
    source = ModelSource(of_parts, "test")
    source.model.part.trainable = False
    source.model.part.layers[1].rate = 0.25
    there = elsewhere(source)
    assert [layer.trainable for layer in there.layers] == [False, True]
    assert there.part.layers[1].rate == 0.25
    values, values_there = read_from_model(source.model), read_from_model(there)
    assert {*values} <= {*values_there}
    assert all((values[name] == values_there[name]).all() for name in values if name.startswith("parameters/"))


def test_a_changed_model_of_which_another_process_would_build_another_one_is_refused() -> None:
    source = ModelSource(of_parts, "test")
    source.model.last.enable_lora(1)
    with pytest.raises(ConfigError, match="pass a function that builds the model as it is now"):
        elsewhere(source)


def test_a_model_that_was_made_for_another_strategy_is_refused() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = with_dropout()
    with pytest.raises(ConfigError, match=r"made in the scope of a MirroredStrategy, .* make it outside of the scope"):
        ModelSource(model, "test")


class Normalized(keras.Model):
    """Has no config of its own, and layers that `build` changes: it makes a list of an axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = keras.layers.LayerNormalization(), keras.layers.Dense(width)

    def call(self, x: Any) -> Any:
        return self.out(self.norm(x))


def test_a_model_that_has_only_been_built_since_is_built_by_its_function_elsewhere() -> None:
    def build() -> keras.Model:
        model = Normalized(2)
        model.compile("sgd", "mse")
        return model

    source = ModelSource(build, "multi_worker_mirrored")
    source.model(np.ones((2, 4)))
    assert source.__getstate__()["_build_model"] is build
    source.model.norm.trainable = False
    assert source.__getstate__()["_build_model"] is source.model


def test_the_description_tells_models_and_losses_apart() -> None:
    def small(loss: Any = "mse") -> keras.Model:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
        return model

    source = ModelSource(small, "test")
    assert source.description == {}
    _ = source.built
    named = f"{__name__}.test_the_description_tells_models_and_losses_apart.<locals>.small, 3 weights"
    assert source.description == {"model": named, "loss": "mean_squared_error"}
    losses = [keras.losses.MeanSquaredError(), "no_such_loss", {"a": "mae"}, None]
    assert [ModelSource(small(loss), "test").description["loss"] for loss in losses] == [
        "mean_squared_error", "no_such_loss", {"a": "mean_absolute_error"}, None,
    ]  # fmt: skip
