"""Bringing trained values back into the user's own Keras model."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from kdist.parameters.apply import optimizer_state
from kdist.parameters.names import variable_names


def write_to_model(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """Sets the model's weights, its optimizer's slots and its iteration count.

    Args:
        model: built and compiled.
        values: what `ParameterStore.read` or a checkpoint holds.
    """
    trainable = model.trainable_variables
    variables = [*trainable, *model.non_trainable_variables]
    names = variable_names(model, variables)
    for i, (variable, name) in enumerate(zip(variables, names)):
        group = "parameters" if i < len(trainable) else "state"
        # The states of random seeds are each worker's own and are not stored.
        if f"{group}/{name}" in values:
            variable.assign(values[f"{group}/{name}"])
    for name, variable in optimizer_state(model.optimizer, trainable, names[: len(trainable)]).items():
        variable.assign(values[name])
    model.optimizer.iterations.assign(values["global_step"])
