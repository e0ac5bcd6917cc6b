"""Data that Python makes batch by batch: generators, `PyDataset`s and the like.

`BatchSource` makes the batches in this process; with `PyDatasetShares` each process of the program makes its own.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import cached_property, partial
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras_data import as_tensor, get_data_adapter, is_made_in_batches, is_scipy_sparse
from kdist.data.base import DataContext, TrainingData
from kdist.errors import ConfigError, KdistError, TaskError


class ShuffledBatches(keras.utils.PyDataset):
    """The batches of a data set of known length, in an order that any process finds by the seed and the pass.

    Without a seed they keep theirs.
    """

    def __init__(self, dataset: keras.utils.PyDataset, seed: int | None) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._seed = seed
        self.enter(0)

    def enter(self, pass_number: int, first: int = 0) -> None:
        """Continues with the batches of a pass, from the number `first` on."""
        order = np.arange(self._dataset.num_batches)
        if self._seed is not None:
            np.random.default_rng([self._seed, pass_number]).shuffle(order)
        self._order = order[first:]

    def index_of(self, number: int) -> int:
        """The index in the other data set of one of these batches."""
        return int(self._order[number])

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self.index_of(index)]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


#: Packages whose code is not the user's.
_OTHERS = ("grain", "kdist", "keras", "multiprocessing", "tensorflow", "torch")


def has_sparse_matrix(*trees: Any) -> bool:
    """True if there is a sparse matrix of SciPy among arrays."""
    return any(map(is_scipy_sparse, tf.nest.flatten(trees)))


class BatchSource:
    """Batches that this process makes, pass after pass.

    Whatever makes them raises `ConfigError` if Keras does not take such batches, or one is not like the first ones, and
    `TaskError` if the user's code failed.

    Args:
        x, y, sample_weight, batch_size, shuffle: as for `keras.Model.fit`.
        seed: of the order of the batches of a `PyDataset`.

    Attributes:
        name: for people to read.
        repeats: there is a second pass.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self.name = _name_of(x)
        self.repeats = not isinstance(x, GeneratorType)
        self._in_order: ShuffledBatches | None = None
        if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
            x = self._in_order = ShuffledBatches(x, seed if shuffle else None)
            shuffle = False
        self._arguments = x, y, sample_weight
        self._batch_size = batch_size
        # Keras shuffles a PyDataset and arrays, and warns that it shuffles nothing else.
        is_of_others = isinstance(x, tf.data.Dataset) or is_made_in_batches(x)
        self._shuffle = shuffle and (isinstance(x, keras.utils.PyDataset) or not is_of_others)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_adapted"}

    @cached_property
    def _adapted(self) -> tuple[Any, tf.data.Dataset]:
        """Keras's adapter of the data, by which its `fit` would read them, and the adapter's dataset."""
        x = self._arguments[0]
        if not self.repeats and x.gi_running:
            raise ConfigError(f"{self.name} is being read by another fit")
        try:
            adapter = get_data_adapter(*self._arguments, batch_size=self._batch_size, shuffle=self._shuffle)
            dataset = adapter.get_tf_dataset()
        except KdistError:
            raise
        except Exception as error:
            # Keras's own, about what it was given. Before 3.13 it takes the first batch of an empty generator.
            if isinstance(error, ValueError | IndexError) and not _user_frame(error):
                told = "must yield at least one batch" if isinstance(error, IndexError) else error
                raise ConfigError(f"{self.name}: {told}") from error
            raise self._failed(0, error) from error
        if adapter.num_batches == 0:
            raise ConfigError(f"{self.name} has no batch")
        return adapter, dataset

    @cached_property
    def element_spec(self) -> Any:
        """The specs of a batch."""
        # A part without a value, an optional input, is None.
        return tf.nest.map_structure(
            lambda spec: tf.type_spec_from_value(None) if isinstance(spec, tf.OptionalSpec) else spec,
            _without_none(self._adapted[1].element_spec),
        )

    @property
    def num_batches(self) -> int | None:
        """Of a pass; None if it is not known."""
        return self._adapted[0].num_batches

    @property
    def is_endless(self) -> bool:
        """True if it is known that no pass ends."""
        return isinstance(self._arguments[0], keras.utils.PyDataset) and self.num_batches is None

    def reset(self) -> None:
        """Ends the epoch in which Keras has looked at the first batches, as it does before the first epoch."""
        self._adapted[0].on_epoch_end()

    def one_pass(self, pass_number: int, first: int = 0) -> Iterator[tuple[int, list[tf.Tensor] | None]]:
        """The batches of a pass, each as its number and the tensors that its parts consist of.

        Those before the number `first` are not made, or have no tensors.
        """
        adapter, dataset = self._adapted
        number = begin = 0 if self._in_order is None else first
        if self._in_order is not None:
            self._in_order.enter(pass_number, first)
        try:
            adapter.on_epoch_begin()
            # In Keras's own iterator, an error of the user's code stays as it is; a dataset makes it TensorFlow's.
            batches = iter(adapter.get_numpy_iterator() if is_made_in_batches(self._arguments[0]) else dataset)
            for number in itertools.count(begin):
                if (batch := next(batches, None)) is None:
                    break
                yield number, self.tensors(self._name_in_pass(number, begin), batch) if number >= first else None
            adapter.on_epoch_end()
        except KdistError:
            raise
        except Exception as error:
            raise self._failed(self._name_in_pass(number, begin), error) from error

    def stop(self) -> None:
        """Ends the threads and processes of a pass that is not read to its end."""
        if (enqueuer := getattr(self._adapted[0], "enqueuer", None)) is not None:
            enqueuer.stop()

    def tensors(self, number: int, batch: Any) -> list[tf.Tensor]:
        """The tensors that the parts of a batch consist of."""
        batch = _without_none(batch)
        try:
            tf.nest.assert_same_structure(self.element_spec, batch, expand_composites=False)
            pairs = zip(tf.nest.flatten(batch), tf.nest.flatten(self.element_spec))
            parts = [(as_tensor(part, spec), spec) for part, spec in pairs]
            fit = all(spec.is_compatible_with(part) for part, spec in parts)
        except (TypeError, ValueError):
            fit = False
        if not fit:
            raise ConfigError(
                f"batch {number} of {self.name} is {_shapes_of(batch)}; the first ones are "
                f"{_shapes_of(self.element_spec)}, and all must have the same parts, dtypes and shapes, but for the "
                "number of examples"
            )
        return tf.nest.flatten([part for part, _ in parts if part is not None], expand_composites=True)

    def _name_in_pass(self, number: int, begin: int) -> int:
        """The number by which the user's code knows a batch of the present pass."""
        in_order = self._in_order
        return number if in_order is None or number - begin >= len(in_order) else in_order.index_of(number - begin)

    def _failed(self, number: int, error: Exception) -> TaskError:
        return TaskError("chief", error, where=f"batch {number} of {self.name}{_user_frame(error)}")


def _name_of(x: Any) -> str:
    if isinstance(x, GeneratorType):
        return f"the generator {x.__name__}"
    if isinstance(x, keras.utils.PyDataset):
        return f"the PyDataset {type(x).__name__}"
    if isinstance(x, tf.data.Dataset):
        return "the dataset"
    return f"the {type(x).__name__}" if is_made_in_batches(x) else "the data with a sparse matrix"


def _without_none(batch: Any) -> Any:
    """A batch without labels or weights that are None, and with tuples for lists, of which datasets make a tensor."""
    batch = keras.tree.lists_to_tuples(batch)
    while isinstance(batch, tuple) and batch and (batch[-1] is None or isinstance(batch[-1], tf.OptionalSpec)):
        batch = batch[:-1]
    return batch


def _shapes_of(batch: Any) -> Any:
    """The dtypes and shapes in a batch."""
    return tf.nest.map_structure(
        lambda part: f"{getattr(part.dtype, 'name', part.dtype)}{list(part.shape)}" if hasattr(part, "shape") else part,
        batch,
    )


def _user_frame(error: Exception) -> str:
    """The place in the user's own code where an error happened; empty if others' code raised it."""
    others = tuple(os.path.dirname(sys.modules[name].__file__ or "") for name in _OTHERS if name in sys.modules)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others):
            return f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return ""


class PyDatasetShares(TrainingData):
    """A data set of which every process has a copy; each replica makes every n-th batch of it, by its number.

    Its batches must depend on their numbers only; their order is that of `ShuffledBatches`, the same in all processes.
    """

    def __init__(self, dataset: keras.utils.PyDataset, *, seed: int | None) -> None:
        self._dataset, self._shuffled = dataset, ShuffledBatches(dataset, seed)
        self._source = BatchSource(dataset)
        self._spec = self._source.element_spec
        self._pass: int | None = None

    def batches_per_pass(self, num_workers: int) -> int:
        return len(self._shuffled)

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        lock = threading.Lock()
        flat = tf.data.Dataset.from_generator(
            partial(self._batches, lock, context.num_workers),
            args=(context.worker_index, context.first_batch),
            output_signature=tuple(tf.nest.flatten(self._spec, expand_composites=True)),
        )
        return flat.map(lambda *parts: tf.nest.pack_sequence_as(self._spec, parts, expand_composites=True))

    def _batches(
        self, lock: threading.Lock, num_workers: int, worker: np.int64, first_batch: np.int64
    ) -> Iterator[tuple[Any, ...]]:
        for index in itertools.count(int(first_batch) * num_workers + int(worker), num_workers):
            pass_number, number = divmod(index, len(self._shuffled))
            with lock:
                # Replicas of one process share the data set.
                if self._pass is None or pass_number > self._pass:
                    self._begin(pass_number)
                batch = self._shuffled.index_of(number)
            yield tuple(self._source.tensors(batch, self._dataset[batch]))

    def _begin(self, pass_number: int) -> None:
        if self._pass is not None:
            self._dataset.on_epoch_end()
        self._pass = pass_number
        self._shuffled.enter(pass_number)
        self._dataset.on_epoch_begin()
