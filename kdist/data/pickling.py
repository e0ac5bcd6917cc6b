"""Sends Python objects of the user to other processes of this machine, by cloudpickle.

Datasets travel as their graph, and memory-mapped arrays as the places of their files.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np

from kdist.errors import ConfigError, KdistError


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, name_of: Callable[[Any], str | None]) -> None:
        super().__init__(file)
        self._name_of = name_of

    def persistent_id(self, obj: Any) -> str | None:
        return self._name_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        import keras
        import tensorflow as tf

        from kdist._compat.keras import custom_objects_of
        from kdist.data.array_files import file_of

        if isinstance(obj, tf.data.Dataset):
            from kdist.data.serialization import dataset_graph

            return _dataset, (dataset_graph(obj).numpy(), obj.element_spec)
        if isinstance(obj, np.ndarray) and (file := file_of(obj)) is not None:
            return np.memmap, (file.path, file.dtype, "r", file.offset, file.shape)
        if isinstance(obj, keras.Model):
            # Keras saves a class by its name, which another process does not know if it is of the user's own script.
            check_lambdas(obj)
            return _model, (custom_objects_of(obj), *obj.__reduce__())
        return super().reducer_override(obj)


def _dataset(graph: bytes, element_spec: Any) -> Any:
    import tensorflow as tf

    from kdist.data.serialization import dataset_of_graph

    return dataset_of_graph(tf.constant(graph), element_spec)


def _model(custom_objects: dict[str, Any], load: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import keras

    with keras.saving.custom_object_scope(custom_objects):
        return load(*arguments)


def check_lambdas(model: Any) -> None:
    """Refuses a model, rather than the function that builds it, with lambdas that read names of the user's program.

    Keras saves the code of a lambda, and nothing that it reads.

    Raises:
        ConfigError: names the layer.
    """
    import keras

    from kdist._compat.keras import layers_of

    for layer in layers_of(model):
        if isinstance(layer, keras.layers.Lambda) and layer.function.__name__ == "<lambda>":
            code = layer.function.__code__
            if unknown := [name for name in code.co_names if name in layer.function.__globals__] + [*code.co_freevars]:
                raise ConfigError(
                    f"model {model.name}: the lambda of layer {layer.name} reads {', '.join(unknown)}, which a saved "
                    "model does not contain; give the function that builds the model"
                )


def pickled(program: Any, name_of: Callable[[Any], str | None] = lambda _: None) -> bytes:
    """The object as bytes.

    Args:
        name_of: the name of an object that does not travel, because the other process has its own; None for others.

    Raises:
        ConfigError: something in it cannot be sent to another process.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, name_of).dump(program)
    except KdistError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model, data or hooks cannot be sent to the processes that train: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: str) -> Any:
        return self._objects[pid]


def unpickled(packed: bytes, objects: Mapping[str, Any] | None = None) -> Any:
    """Undoes `pickled`. Runs code: only for what this run's own processes sent.

    Args:
        objects: those of this process, by the names that `name_of` gave them there.
    """
    return _Unpickler(io.BytesIO(packed), objects or {}).load()
