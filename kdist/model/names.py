"""Names of a model's variables that are the same in every process, for checkpoints and the placement table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

#: The name of the number of updates in a store and in checkpoints.
GLOBAL_STEP = "global_step"
#: The name of the learning rate in a store and in checkpoints.
LEARNING_RATE = "optimizer/learning_rate"
#: The names of the scale of a loss, the steps since it last changed, and the steps that overflowed.
DYNAMIC_SCALE = "optimizer/dynamic_scale"
DYNAMIC_SCALE_STEPS = "optimizer/dynamic_scale_steps"
DROPPED_STEPS = "optimizer/dropped_steps"
#: The name of the number of resets of each state of a stateful layer by callbacks.
STATE_RESETS = "state_resets"
#: Keras's name of the slot that has the moving average of a variable.
AVERAGE = "average"
#: The name of the run's seed in checkpoints.
SEED = "seed"
#: The name of the position in data that may end, in checkpoints: JSON.
DATA_STATE = "data_state"
#: The name, in checkpoints, of the count of epochs, an `EpochCount`.
EPOCHS_BEGIN = "epochs_begin"
#: The name, in checkpoints, of the fingerprint of the data.
DATA_FINGERPRINT = "data_fingerprint"
#: The values in checkpoints beside those of the model.
BESIDE = (SEED, DATA_STATE, EPOCHS_BEGIN, DATA_FINGERPRINT)
#: The names, in deltas, of the step that a delta follows; and, before the name of a table, of its rows that have
#: changed, and of ids that have lost their rows.
FOLLOWS = "delta/follows"
CHANGED_IDS = "delta/ids/"
EVICTED = "delta/evicted/"


def variable_names(model: keras.Model, variables: Sequence[keras.Variable]) -> list[str]:
    """Unique names such as `conv2d/kernel`, in the order of `variables`.

    Keras numbers automatic layer names per process, so that the second model of a process has `dense_7` where the first
    one had `dense`. Here they are numbered per model, and the model's own name is omitted. Variables that the model
    does not have, as those of a loss, are numbered in their order.
    """
    of_model = {id(variable) for variable in model.variables}
    layer_names = _process_independent_names(model)
    names: list[str] = []
    taken: dict[str, int] = {}
    for variable in variables:
        parts = variable.path.split("/")
        if len(parts) > 1 and parts[0] == model.name:
            parts = parts[1:]
        is_own = id(variable) in of_model
        name = "/".join(layer_names.get(part, part) if is_own else re.sub(r"_\d+$", "", part) for part in parts)
        count = taken[name] = taken.get(name, -1) + 1
        names.append(f"{name}_{count}" if count else name)
    return names


def dynamic_names(vectors: str, columns: Sequence[str]) -> dict[str, str]:
    """The names of the columns of a dynamic table in checkpoints, by their names on a server.

    Args:
        vectors: the name of the variable that stands for its vectors: `dynamic_embedding/embeddings`.
        columns: `vectors`, `ids`, `counts`, `last_steps`, and the others are slots.
    """
    known = {
        "vectors": f"parameters/{vectors}",
        "ids": f"parameters/{vectors}_ids",
        "counts": f"state/{vectors}_counts",
        "last_steps": f"state/{vectors}_last_steps",
    }
    return {column: known.get(column, f"slots/{vectors}/{column}") for column in columns}


def average_of(parameter: str) -> str:
    """The name of the moving average of `parameters/<name>`: `slots/<name>/average`."""
    return f"slots/{parameter.removeprefix('parameters/')}/{AVERAGE}"


def is_seed(variable: keras.Variable) -> bool:
    """True for the state of a random seed: each worker has its own, and none is stored."""
    return variable.name == "seed_generator_state"


def _process_independent_names(model: keras.Model) -> dict[str, str]:
    # Not above: hooks, which --help lists, import this module, and need no Keras for it.
    from kdist._compat.keras import layers_of

    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    for layer in layers_of(model, include_self=False):
        base = re.sub(r"_\d+$", "", layer.name)
        is_automatic = base.replace("_", "") == type(layer).__name__.lower()
        if is_automatic and layer.name not in renamed:
            count = counts[base] = counts.get(base, -1) + 1
            renamed[layer.name] = f"{base}_{count}" if count else base
    return renamed
