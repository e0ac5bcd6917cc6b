"""Private names of Keras that read data of Python; read in 3.12 to 3.15."""

from __future__ import annotations

from types import GeneratorType
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter, is_grain_dataset, is_torch_dataloader
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import is_scipy_sparse, scipy_sparse_to_tf_sparse

# Imported here for others.
__all__ = ["get_data_adapter", "is_scipy_sparse"]


def is_made_in_batches(x: Any) -> bool:
    """Tells whether Keras's `fit` takes `x` as data that code of Python makes, batch by batch."""
    is_of_keras = isinstance(x, (keras.utils.PyDataset, GeneratorType, DataAdapter))
    return is_of_keras or is_torch_dataloader(x) or is_grain_dataset(x)


def as_tensor(value: Any, spec: tf.TypeSpec) -> Any:
    """A part of a batch as a tensor of the type that Keras gives to it."""
    if is_scipy_sparse(value):
        return scipy_sparse_to_tf_sparse(value)
    if isinstance(spec, tf.TensorSpec):
        return tf.convert_to_tensor(value, spec.dtype)
    return value
