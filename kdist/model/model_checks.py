"""What can be said of a model before it is built, and before anything starts: whether a replica step can train it."""

from __future__ import annotations

import keras

from kdist._compat.keras import layers_of, optimizers_of
from kdist._compat.reserved import made_by
from kdist.errors import ConfigError
from kdist.model.optimizer import check_optimizer


def check_model(model: keras.Model, strategy: str) -> None:
    """Refuses a model that no replica step can train under the strategy of this name.

    Raises:
        ConfigError: says what to do instead.
    """
    if not model.compiled:
        raise ConfigError(
            f"model {model.name} is not compiled: call model.compile(optimizer=..., loss=...) in the function that "
            "builds it, or give optimizer, loss and metrics in the config"
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
