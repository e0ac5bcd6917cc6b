"""Bringing trained values back into the user's own Keras model."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from kdist.parameters.apply import optimizer_state
from kdist.parameters.names import is_seed, variable_names


def read_from_model(model: keras.Model) -> dict[str, np.ndarray]:
    """The values of a model and its optimizer, by the names that they have in a checkpoint."""
    return {name: variable.numpy() for name, variable in _named_variables(model).items()}


def write_to_model(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """Sets the model's weights, its optimizer's slots and its iteration count.

    Args:
        model: built and compiled.
        values: what `ParameterStore.read` or a checkpoint holds.
    """
    for name, variable in _named_variables(model).items():
        # The states of random seeds are each worker's own and are not stored.
        if name in values:
            variable.assign(values[name])


def parameter_names(model: keras.Model) -> dict[str, keras.Variable]:
    """What a model computes with, by the names in a checkpoint: parameters and state, but for seeds."""
    wanted = ("parameters/", "state/")
    return {n: v for n, v in _named_variables(model).items() if n.startswith(wanted) and not is_seed(v)}


def _named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    trainable = model.trainable_variables
    variables = [*trainable, *model.non_trainable_variables]
    names = variable_names(model, variables)
    groups = ["parameters"] * len(trainable) + ["state"] * (len(variables) - len(trainable))
    named = {f"{group}/{name}": variable for group, name, variable in zip(groups, names, variables)}
    slots = optimizer_state(model.optimizer, trainable, names[: len(trainable)])
    return {**named, **slots, "global_step": model.optimizer.iterations}
