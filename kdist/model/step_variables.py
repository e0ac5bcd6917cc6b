"""The variables that a step uses beside those that it is given: what it may read, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import keras
import tensorflow as tf

from kdist._compat.keras import layers_of, loss_scaling, loss_tracker, optimizers_of
from kdist.errors import ConfigError
from kdist.model.names import is_seed
from kdist.model.state import layer_states, stateful_layers


def of_tensorflow(variables: Iterable[tf.Variable], known: Iterable[keras.Variable]) -> list[tf.Variable]:
    """The variables that are not those of Keras's variables."""
    values = {id(variable.value) for variable in known}
    return [variable for variable in variables if id(variable) not in values]


def check_assigned(model: keras.Model, assigned: Mapping[int, keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, a step that assigns a variable of Keras that the model does not know.

    The states of random seeds have a place in the step's scope.
    """
    if others := [v.path for v in _of_others(model, assigned)]:
        raise ConfigError(
            f"model {model.name}: a step assigns {', '.join(others)}, which the model does not have; make it with "
            "self.add_weight(..., trainable=False) of the model or a layer, or assign its owner to an attribute of them"
        )


def read_beside(model: keras.Model, read: Mapping[int, keras.Variable]) -> list[keras.Variable]:
    """The variables that a step reads beside those of the model and its optimizers: of a loss, a metric, a regularizer.

    A callback may assign them, so they belong to the state of the training.
    """
    of_optimizers = {id(v) for optimizer in optimizers_of(model).values() for v in optimizer.variables}
    if (scaling := loss_scaling(model)) is not None:
        of_optimizers |= {id(v) for v in scaling.variables}
    return [v for v in _of_others(model, read) if id(v) not in of_optimizers]


def _of_others(model: keras.Model, variables: Mapping[int, keras.Variable]) -> list[keras.Variable]:
    """The variables that the model does not know. Seeds are not among them: a step's scope has their states."""
    states = (variable for layer in stateful_layers(model) for variable in layer_states(layer))
    known = {id(v) for v in (*model.variables, *model.metrics_variables, *loss_tracker(model).variables, *states)}
    return [v for key, v in variables.items() if key not in known and not is_seed(v)]


def check_exchanges(model: keras.Model, exchanges: Sequence[str], assigned: Mapping[int, keras.Variable]) -> None:
    """Refuses, with a `ConfigError`, a step that reads, before its end, what other replicas have computed.

    A layer whose statistics the step assigns is to read it even where Keras's code does not: with a mask it takes the
    moments of the replica alone.
    """
    layers = [layer for layer in layers_of(model) if getattr(layer, "synchronized", False)]
    if not exchanges and not any(id(v) in assigned for layer in layers for v in layer.non_trainable_variables):
        return
    names = [f"{type(layer).__name__} {layer.name}" for layer in layers]
    raise ConfigError(
        f"model {model.name}: {', '.join(names) or 'its step'} (synchronized=True, or the replica context of "
        "tf.distribute) needs values of the other replicas in the middle of a step, which replicas of kdist do not "
        "exchange; set synchronized=False, or train with one replica (cluster=local) or strategy=parameter_server"
    )
