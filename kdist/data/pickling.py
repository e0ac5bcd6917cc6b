"""Sends Python objects of the user to other processes, by cloudpickle; datasets travel as their graph."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle

from kdist.errors import ConfigError, KdistError


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        import tensorflow as tf

        if isinstance(obj, tf.data.Dataset):
            from kdist.data.serialization import dataset_graph

            return _dataset, (dataset_graph(obj).numpy(), obj.element_spec)
        return super().reducer_override(obj)


def _dataset(graph: bytes, element_spec: Any) -> Any:
    import tensorflow as tf

    from kdist.data.serialization import dataset_of_graph

    return dataset_of_graph(tf.constant(graph), element_spec)


def pickled(program: Any) -> bytes:
    """The object as bytes.

    Raises:
        ConfigError: something in it cannot be sent to another process.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(program)
    except KdistError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model, data or hooks cannot be sent to the processes that train: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def unpickled(packed: bytes) -> Any:
    """Undoes `pickled`. Runs code: only for what this run's own chief sent."""
    return pickle.loads(packed)
