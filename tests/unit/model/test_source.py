"""`ModelSource` in another process: builds the model there, or brings the one that the user has changed."""

from __future__ import annotations

from collections.abc import Callable

import cloudpickle
import keras
import models
import pytest

from kdist.model.source import ModelSource


def elsewhere(source: ModelSource) -> keras.Model:
    """The model of another process."""
    return cloudpickle.loads(cloudpickle.dumps(source)).model


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
