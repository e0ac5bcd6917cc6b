"""Weights of a model from a checkpoint of TF1: of `tf.train.Saver`, an Estimator or a `MonitoredTrainingSession`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kdist.errors import CheckpointError, ConfigError

#: TF1's names for the weights of a layer, by Keras's.
_SAME_ROLE = {
    "kernel": ("weights", "w"),
    "bias": ("biases", "b"),
    "embeddings": ("embedding", "embedding_weights", "weights", "table"),
    "depthwise_kernel": ("depthwise_weights",),
    "pointwise_kernel": ("pointwise_weights",),
}
_STEP = "global_step"

NameMap = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A report of `load_tf1_checkpoint`; as text, a table.

    Attributes:
        path: of the checkpoint.
        global_step: of the checkpoint; None if it has none.
        names: the name in the checkpoint of each weight that was loaded, by its path (`dense/kernel`).
        missing: paths of weights that kept their values.
        unused: names in the checkpoint that no weight took, optimizer slots among them.
    """

    path: str
    global_step: int | None
    names: Mapping[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        width = max((len(path) for path in [*self.names, *self.missing]), default=0)
        rows = [f"{path:<{width}}  <- {name}" for path, name in self.names.items()]
        rows += [f"{path:<{width}}  not in the checkpoint, kept" for path in self.missing]
        rows += [f"{'':<{width}}     {name} not used" for name in self.unused]
        step = "" if self.global_step is None else f" of step {self.global_step}"
        return "\n".join([f"{self.path}{step}: {len(self.names)} weights loaded", *rows])


def load_tf1_checkpoint(
    model: keras.Model, path: str | os.PathLike[str], name_map: NameMap | None = None
) -> LoadedCheckpoint:
    """Loads the weights of a built model from a checkpoint of TF1, by name and shape.

    A weight takes the variable that `name_map` names; else the one of its own path, with or without scopes before it;
    else the only one of its shape and role that is left (`weights` and `biases` are roles, too). Partitioned variables
    are read as a whole. Slots of optimizers are not loaded.

    Args:
        model: its weights get the values.
        path: a checkpoint, as `model.ckpt-2000`, or the folder of several, of which the newest counts.
        name_map: names in the checkpoint by paths of weights (`dense/kernel`), or a function that gets a path and
            returns the name, or None.

    Returns:
        What was loaded from where, what was not, and the global step of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or no weight of the model is in it; nothing has changed.
        ConfigError: the model is not built, or `name_map` names what does not exist, or has another shape.
    """
    if not model.built:
        raise ConfigError(f"model {model.name}: has no weights yet; build it, for example with an Input layer")
    try:
        reader = tf.train.load_checkpoint(os.fspath(path))
    except (ValueError, tf.errors.OpError) as error:
        raise CheckpointError(f"{os.fspath(path)}: no checkpoint of TF1 can be read: {error}") from None
    shapes = {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}
    # A Sequential model puts its own name before the paths of its weights, a functional one does not.
    weights = {weight.path.removeprefix(f"{model.name}/"): weight for weight in model.weights}
    if len(weights) < len(model.weights):
        raise ConfigError(f"model {model.name}: several weights have one path; give its layers names of their own")
    names = _given(name_map, weights, shapes)
    for find in (_by_name, _by_role):
        left = {name: shape for name, shape in shapes.items() if name not in names.values()}
        wanted = {weight_path: tuple(w.shape) for weight_path, w in weights.items() if weight_path not in names}
        names |= find(wanted, left)
    if not names:
        raise CheckpointError(
            f"{os.fspath(path)}: has none of the weights of model {model.name}; give name_map\n"
            f"  the model has {_few(weights)}\n  the checkpoint has {_few(shapes)}"
        )
    for weight_path, name in names.items():
        weights[weight_path].assign(reader.get_tensor(name))
    return LoadedCheckpoint(
        os.fspath(path),
        int(reader.get_tensor(_STEP)) if _STEP in shapes else None,
        {weight_path: names[weight_path] for weight_path in weights if weight_path in names},
        tuple(weight_path for weight_path in weights if weight_path not in names),
        tuple(sorted(shapes.keys() - names.values() - {_STEP})),
    )


def _given(name_map: NameMap | None, weights: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, str]:
    """The part of the map that is about this model, checked."""
    if isinstance(name_map, Mapping):
        given: dict[str, str | None] = dict(name_map)
    else:
        given = {path: name_map(path) for path in weights} if name_map is not None else {}
    found = {path: name for path, name in given.items() if name is not None}
    for path, name in found.items():
        if path not in weights:
            raise ConfigError(f"name_map[{path!r}]: the model has no such weight; it has {_few(weights)}")
        if name not in shapes:
            raise ConfigError(f"name_map[{path!r}]={name!r}: not in the checkpoint, which has {_few(shapes)}")
        if tuple(weights[path].shape) != shapes[name]:
            raise ConfigError(
                f"name_map[{path!r}]={name!r}: has shape {shapes[name]}, the weight {tuple(weights[path].shape)}"
            )
    return found


def _by_name(weights: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Weights whose path is a name, or the end of exactly one, of their shape."""
    found = {path: path for path, shape in weights.items() if shapes.get(path) == shape}
    for path, shape in weights.items() - found.items():
        ends = [name for name in shapes if shapes[name] == shape and name.endswith(f"/{path}")]
        ends += [name for name in shapes if shapes[name] == shape and path.endswith(f"/{name}") and "/" in name]
        if len(ends) == 1 and ends[0] not in found.values():
            found[path] = ends[0]
    return found


def _by_role(weights: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Weights that are the only ones of their shape and role, where the checkpoint has only one such variable, too."""
    found = {}
    for path, shape in weights.items():
        role = path.rpartition("/")[2]
        roles = {role, *_SAME_ROLE.get(role, ())}
        rivals = [other for other, its in weights.items() if its == shape and other.rpartition("/")[2] == role]
        named = [name for name, its in shapes.items() if its == shape and name.rpartition("/")[2] in roles]
        if len(rivals) == len(named) == 1:
            found[path] = named[0]
    return found


def _few(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f", ... ({len(listed)})" if len(listed) > 8 else "")
