"""What can be said of a model before it is built, and before anything starts: whether a replica step can train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kdist._compat.keras import layers_of, optimizers_of, strategy_of
from kdist._compat.lazy_variable import made_by
from kdist.errors import ConfigError
from kdist.model.optimizer import check_optimizer


def check_compiled(model: keras.Model) -> None:
    """Refuses, with a `ConfigError`, to train a model that is not compiled."""
    if not model.compiled:
        raise ConfigError(
            f"model {model.name} is not compiled: call model.compile(optimizer=..., loss=...) in the function that "
            "builds it, or give optimizer, loss and metrics in the config"
        )


def check_model(model: keras.Model, strategy: str) -> None:
    """Refuses a compiled model that no replica step can train under the strategy of this name.

    Raises:
        ConfigError: says what to do instead.
    """
    if overrides_of(model, "make_train_function") or (overrides_of(model, "fit") and preprocessing_of(model) is None):
        raise ConfigError(
            f"model {model.name}: class {type(model).__name__} has a `fit` or `make_train_function` of its own, which "
            "is not called here: prepare the data before (dataset.map(...)), put what belongs to a step into "
            "`train_step`, and give a model without it, as keras.Model(model.inputs, model.outputs), compiled"
        )
    if (scope := strategy_of(model)) is not None:
        raise ConfigError(
            f"model {model.name}: made in the scope of a {type(scope).__name__}, whose variables cannot be trained; "
            "make it outside of the scope, and choose with `strategy` how it is trained"
        )
    if model.optimizer is None:
        raise ConfigError(
            f"model {model.name} is compiled without an optimizer; a model with its own `compile` gives it to "
            "super().compile(optimizer=...)"
        )
    known = (keras.layers.RNN, keras.layers.Bidirectional)
    stateful = [layer for layer in layers_of(model) if getattr(layer, "stateful", False)]
    if names := [layer.name for layer in stateful if not isinstance(layer, known)]:
        raise ConfigError(
            f"model {model.name}: {', '.join(names)}: only layers that derive from keras.layers.RNN may be stateful; "
            "others keep what they remember in self.add_weight(..., trainable=False), which all workers share"
        )
    saved = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.TFSMLayer)]
    if names := [layer.name for layer in saved if layer.trainable_variables]:
        raise ConfigError(
            f"model {model.name}: {', '.join(names)}: a TFSMLayer cannot be trained here, for the function in its file "
            "reads its own variables; give it trainable=False, or build the model of Keras layers"
        )
    for optimizer in optimizers_of(model).values():
        check_optimizer(optimizer, strategy)


def check_has_values(model: keras.Model) -> None:
    """Refuses a model whose values stayed on parameter servers.

    Raises:
        ConfigError: says what to give instead.
    """
    if names := [variable.path for variable in model.variables if made_by(variable) is not None]:
        raise ConfigError(
            f"model {model.name}: the values of {', '.join(names)} were on parameter servers only; give the function "
            "that builds the model, and the run dir that has its checkpoints"
        )


def overrides_of(model: keras.Model, *methods: str) -> list[str]:
    """The names of those of these methods of a model that are not Keras's own."""
    return [name for name in methods if getattr(type(model), name) is not getattr(keras.Model, name)]


def preprocessing_of(model: keras.Model) -> Callable[..., Any] | None:
    """The function `(x, y, sample_weight) -> batch` by which a model's own `fit` prepares batches; None without one.

    It is the `preprocess_samples` of the class that has the `fit`, as in every task of KerasHub.
    """
    owner = next(kind for kind in type(model).__mro__ if "fit" in vars(kind))
    return model.preprocess_samples if "preprocess_samples" in vars(owner) else None
