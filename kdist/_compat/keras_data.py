"""Private names of Keras that read data of Python; read in 3.12 to 3.15."""

from __future__ import annotations

from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter, is_grain_dataset, is_torch_dataloader
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import is_scipy_sparse, scipy_sparse_to_tf_sparse

# Imported here for others.
__all__ = ["is_scipy_sparse"]


def is_made_in_batches(x: Any) -> bool:
    """Tells whether Keras's `fit` takes `x` as data that code of Python makes, batch by batch."""
    is_of_keras = isinstance(x, (keras.utils.PyDataset, GeneratorType, DataAdapter))
    return is_of_keras or is_torch_dataloader(x) or is_grain_dataset(x)


class PythonBatches:
    """The batches that Keras's `fit` would read, by its own adapters; the public API has them inside `fit` only.

    Args:
        x, y, sample_weight, batch_size, shuffle: as for `fit`.

    Raises:
        ValueError: Keras refuses them.
    """

    def __init__(self, x: Any, y: Any, sample_weight: Any, batch_size: int | None, shuffle: bool) -> None:
        self._adapter = get_data_adapter(x, y, sample_weight, batch_size=batch_size, shuffle=shuffle)
        # Its own iterator shows an error of the user's code as it is; a dataset over it, as one of TensorFlow's.
        self._is_python = is_made_in_batches(x)
        self._dataset = self._adapter.get_tf_dataset()

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a batch; where it has None, there is a `tf.OptionalSpec`."""
        return self._dataset.element_spec

    @property
    def num_batches(self) -> int | None:
        """Of a pass; None if it is not known."""
        return self._adapter.num_batches

    def one_pass(self) -> Iterator[Any]:
        """The batches of a pass, of NumPy arrays or tensors."""
        return iter(self._adapter.get_numpy_iterator() if self._is_python else self._dataset)

    def begin_pass(self) -> None:
        """Begins an epoch, as `fit` does."""
        self._adapter.on_epoch_begin()

    def end_pass(self) -> None:
        """Ends an epoch, as `fit` does, also before the first one."""
        self._adapter.on_epoch_end()

    def stop(self) -> None:
        """Ends the threads or processes of a pass that is not read to its end."""
        if (enqueuer := getattr(self._adapter, "enqueuer", None)) is not None:
            enqueuer.stop()


def as_tensor(value: Any, spec: tf.TypeSpec) -> Any:
    """A part of a batch as a tensor of the type that Keras gives to it."""
    if is_scipy_sparse(value):
        return scipy_sparse_to_tf_sparse(value)
    if isinstance(spec, tf.TensorSpec):
        return tf.convert_to_tensor(value, spec.dtype)
    return value
