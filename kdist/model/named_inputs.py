"""Named arrays, as files have them, as the inputs of a model, and its outputs as named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.errors import ConfigError
from kdist.log import warn

_NUMBERS = "biuf"


def inputs_from(columns: Mapping[str, np.ndarray], model: keras.Model, batch_spec: Any, place: str) -> Any:
    """The inputs of a model, in its own structure, from columns of the same names.

    An input of several values is one array `[n, ...]`, or columns `name_0`, `name_1` and so on. For a model with one
    input, its name does not matter if there is nothing else, or an array `x`; or all columns together are the input.

    Args:
        columns: arrays `[n, ...]` by name.
        model: built.
        batch_spec: nested `tf.TensorSpec`s of a batch, for a model without `keras.Input`s; if it is None, such a model
            gets the columns as they are.
        place: of the columns, for errors.

    Raises:
        ConfigError: a column is missing, or has another shape or type than the input.
    """
    structure = _structure_of(model, batch_spec)
    if structure is None:
        return next(iter(columns.values())) if len(columns) == 1 else dict(columns)
    parts = tf.nest.flatten(structure)
    # Of one row each.
    inputs = [tf.TensorSpec(x.shape[1:], x.dtype, name) for name, x in zip(_names_of(structure), parts)]
    used: set[str] = set()
    arrays = [_array_for(item, columns, used, place, is_only=len(inputs) == 1) for item in inputs]
    if others := [name for name in columns if name not in used]:
        warn(f"{place}: the model does not take {', '.join(others)}")
    return tf.nest.pack_sequence_as(structure, arrays)


def named_outputs(outputs: Any, model: keras.Model) -> dict[str, np.ndarray]:
    """The outputs of `predict` by name: `predictions`, or the names of several outputs in the model."""
    if isinstance(outputs, Mapping):
        return {str(name): _as_numpy(output) for name, output in outputs.items()}
    if not isinstance(outputs, (list, tuple)):
        return {"predictions": _as_numpy(outputs)}
    names = getattr(model, "output_names", None) or [f"predictions_{index}" for index in range(len(outputs))]
    return {name: _as_numpy(output) for name, output in zip(names, outputs)}


def _as_numpy(output: Any) -> np.ndarray:
    """An array of a type that NumPy itself has: bfloat16 becomes float32."""
    array = np.asarray(output)
    return array.astype(np.float32) if tf.as_dtype(array.dtype) == tf.bfloat16 else array


def _structure_of(model: keras.Model, batch_spec: Any) -> Any:
    if isinstance(model, keras.Sequential) and model.inputs:
        return model.inputs[0]
    if getattr(model, "inputs", None):
        return model.input
    return None if batch_spec is None else keras.utils.unpack_x_y_sample_weight(batch_spec)[0]


def _names_of(structure: Any) -> list[str]:
    """The names of inputs: their keys in a dict, or their own."""
    if isinstance(structure, Mapping):
        return [str(key) for key in sorted(structure)]
    return [getattr(x, "name", None) or f"x_{index}" for index, x in enumerate(tf.nest.flatten(structure))]


def _array_for(
    item: tf.TensorSpec, columns: Mapping[str, np.ndarray], used: set[str], place: str, *, is_only: bool
) -> np.ndarray | tf.Tensor:
    names = [item.name] if item.name in columns else []
    if not names and (size := item.shape.num_elements()) is not None:
        parts = [f"{item.name}_{index}" for index in range(size)]
        names = parts if set(parts) <= set(columns) else []
        if not names and is_only and "x" not in columns and len(columns) == size > 1:
            names = list(columns)
    if not names and is_only:
        names = ["x"] if "x" in columns else list(columns) if len(columns) == 1 else []
    if not names:
        others = f", and {len(columns) - 20} more" if len(columns) > 20 else ""
        raise ConfigError(
            f"{place}: has no column {item.name}, which the model takes as {_describe(item)}; it has "
            f"{', '.join([*columns][:20])}{others}"
        )
    used.update(names)
    arrays = [_convert(columns[name], item, f"{place}: column {name}") for name in names]
    array = _reshape(arrays[0] if len(arrays) == 1 else np.stack(arrays, 1), item, f"{place}: column {names[0]}")
    # Keras takes no strings from NumPy.
    return tf.constant(array) if item.dtype == tf.string else array


def _convert(array: np.ndarray, item: tf.TensorSpec, what: str) -> np.ndarray:
    is_text = array.dtype.kind not in _NUMBERS
    if is_text != (item.dtype == tf.string):
        kind = "text" if is_text else str(array.dtype)
        raise ConfigError(f"{what}: has {kind}, and the model takes {_describe(item)}")
    if item.dtype.is_integer and array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
        raise ConfigError(f"{what}: has numbers that are not whole, and the model takes {_describe(item)}")
    return array if is_text else array.astype(item.dtype.as_numpy_dtype)


def _reshape(array: np.ndarray, item: tf.TensorSpec, what: str) -> np.ndarray:
    shape = array.shape[1:]
    if len(shape) == len(item.shape) and all(wanted in (None, size) for size, wanted in zip(shape, item.shape)):
        return array
    # Columns of single values have no shape of their own.
    if len(shape) <= 1 and prod(shape) == item.shape.num_elements():
        return array.reshape(len(array), *item.shape)
    raise ConfigError(f"{what}: has rows of shape {shape}, and the model takes {_describe(item)}")


def _describe(item: tf.TensorSpec) -> str:
    return f"{item.dtype.name} {tuple(item.shape)}"
