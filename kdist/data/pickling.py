"""Sends Python objects of the user to other processes of this machine, by cloudpickle.

Datasets travel as their graph, and memory-mapped arrays as the places of their files. Functions keep the place of their
source, which AutoGraph and Keras read.
"""

from __future__ import annotations

import io
import linecache
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

import cloudpickle
import numpy as np

from kdist.errors import ConfigError, KdistError


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        import keras
        import tensorflow as tf

        from kdist._compat.keras import ModelDetails, custom_objects_of, name_functions_apart
        from kdist.data.file_column import file_of
        from kdist.data.serialization import dataset_graph

        if isinstance(obj, tf.data.Dataset):
            return _dataset, (dataset_graph(obj).numpy(), obj.element_spec)
        if isinstance(obj, np.ndarray) and (file := file_of(obj)) is not None:
            return np.memmap, (file.path, file.dtype, "r", file.offset, file.shape)
        if isinstance(obj, keras.Model):
            # Keras saves classes and functions by their names, which another process does not know if they are of the
            # user's own script.
            with name_functions_apart(obj) as functions:
                saved = obj.__reduce__()
            return _model, ({**custom_objects_of(obj), **functions}, ModelDetails.of(obj), *saved)
        if isinstance(obj, CodeType):
            make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](obj)
            # Cells of a notebook have no file.
            lines = None if os.path.exists(obj.co_filename) else linecache.getlines(obj.co_filename)
            return _code, (obj.co_filename, lines, make, arguments)
        return super().reducer_override(obj)


def _dataset(graph: bytes, element_spec: Any) -> Any:
    import tensorflow as tf

    from kdist.data.serialization import dataset_of_graph

    return dataset_of_graph(tf.constant(graph), element_spec)


def _model(custom_objects: dict[str, Any], details: Any, load: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import keras

    with keras.saving.custom_object_scope(custom_objects):
        model = load(*arguments)
    if not details.fit(model):
        raise ConfigError(
            f"model {model.name}: another process has to build it as it is now, and its class builds other layers or "
            "variables from its get_config; pass a function that builds the model as it is now"
        )
    details.give_to(model)
    return model


def _code(filename: str, lines: Sequence[str] | None, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> Any:
    """Code that still says where it is from: cloudpickle leaves that out."""
    if lines:
        linecache.cache.setdefault(filename, (sum(map(len, lines)), None, list(lines), filename))
    return make(*arguments).replace(co_filename=filename)


def dumps(program: Any) -> bytes:
    """The object as bytes; raises `ConfigError` if something in it cannot be sent to another process."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(program)
    except KdistError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model or data cannot be sent to the processes that train: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def loads(packed: bytes) -> Any:
    """Undoes `dumps`. Runs code: only for what this run's own processes sent."""
    return pickle.loads(packed)


def pack_program(program: Any) -> bytes:
    """The object as bytes, with the settings of Keras that the program has changed; raises as `dumps`."""
    from kdist._compat.keras_state import registered_objects, settings_here

    objects = {}
    for name, item in registered_objects().items():
        # One that cannot travel may not be needed; if it is, Keras says that it does not know it.
        with suppress(ConfigError):
            objects[name] = dumps(item)
    return pickle.dumps((dumps(settings_here()), objects, dumps(program)))


def unpack_program(packed: bytes) -> Any:
    """Undoes `pack_program`, and makes the settings those of this process. Runs code, as `loads`."""
    from kdist._compat.keras_state import register, set_here

    settings, packed_objects, program = pickle.loads(packed)
    objects = {}
    for name, item in packed_objects.items():
        # Of a module that only the program knows how to import.
        with suppress(ImportError, AttributeError):
            objects[name] = loads(item)
    set_here(*loads(settings))
    register(objects)
    return loads(program)
