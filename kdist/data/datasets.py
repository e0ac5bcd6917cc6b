"""Datasets of tf.data and functions that make them, as training data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import tensorflow as tf

from kdist._compat.tensorflow import argument_for_task
from kdist.data.base import DataContext, TrainingData
from kdist.data.columns import WorkerArgument
from kdist.data.serialization import dataset_graph, dataset_of_graph, uses_libraries
from kdist.data.splits import Passes, Split, Splits
from kdist.errors import ConfigError


class DatasetData(TrainingData):
    """A `tf.data.Dataset` of batches. Its graph is sent to the workers, which read it at the same time.

    Each takes every n-th batch.
    """

    def __init__(self, dataset: tf.data.Dataset, num_iterators: int = 1) -> None:
        cardinality = int(dataset.cardinality().numpy())
        if cardinality == 0:
            raise ValueError("the dataset is empty")
        self._num_batches = cardinality if cardinality > 0 else None
        self._element_spec = dataset.element_spec
        self._graph = dataset_graph(dataset, num_iterators)
        self.is_untried = uses_libraries(self._graph)

    def fingerprint(self) -> str | None:
        return None if self._num_batches is None else f"{self._num_batches} batches of {self._element_spec}"

    def batches_per_pass(self, num_workers: int) -> int | None:
        return self._num_batches

    def share_end(self, share: int, num_shares: int, num_passes: int) -> int | None:
        # Every n-th batch of the passes, one after the other.
        return None if self._num_batches is None else max(0, -(-(num_passes * self._num_batches - share) // num_shares))

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.string)]

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        return [self._graph]

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        dataset = dataset_of_graph(arguments[0], self._element_spec)
        # Repeated first, so that no worker's share of a short dataset is empty.
        repeated = _repeated(dataset, context.first_batch * context.num_workers)
        return repeated.shard(context.num_workers, context.worker_index)


class DatasetPasses(DatasetData):
    """A `tf.data.Dataset` of unknown length, read in passes. A split is every n-th batch of a pass over it."""

    splits: PassQueue

    def __init__(self, dataset: tf.data.Dataset, num_parts: int, steps_per_epoch: int | None = None) -> None:
        super().__init__(dataset, num_parts)
        self.splits = self.passes = PassQueue(num_parts, steps_per_epoch)

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return [*super().specs(num_workers), *[tf.TensorSpec([], tf.int64)] * 3]

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        split = self.splits.assign(worker_index)
        # A resumed run may have another number of parts for its next pass.
        _, part, _, num_parts = split.name.split()
        return [self._graph, *(argument_for_task(n, tf.int64) for n in (int(part) - 1, int(num_parts), split.num_read))]

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        graph, part, num_parts, num_read = arguments
        return dataset_of_graph(graph, self._element_spec).shard(num_parts, part).skip(num_read)


class PassQueue(Splits, Passes):
    """Hands out the parts of a pass, and those of the next one when it is begun; it ends when all were read."""

    place = "the dataset"
    is_only_pass = False

    def __init__(self, num_parts: int, steps_per_epoch: int | None = None) -> None:
        # The read part of a split is counted in batches.
        super().__init__(batch_size=1)
        self._num_parts = num_parts
        self.steps_per_epoch = steps_per_epoch
        #: The present pass: the epoch with which it has begun, True if its parts were found, and the batches of those
        #: that were read to their end.
        self.first_epoch, self._is_found, self._num_finished = 0, False, 0

    def look(self) -> bool:
        with self._changed:
            if not self._is_found:
                self._is_found = True
                self._waiting.extend(Split(f"part {i} of {self._num_parts}") for i in range(1, self._num_parts + 1))
            return bool(self._waiting)

    @property
    def num_read(self) -> int:
        with self._changed:
            return self._num_finished + sum(part.num_read for part in self._unread)

    def finish(self, worker: int) -> None:
        with self._changed:
            if split := self._reading.pop(worker, None):
                self._num_finished += split.num_read

    def pass_has_ended(self) -> bool:
        with self._changed:
            return self._is_found and not self._unread

    def begin_pass(self) -> None:
        with self._changed:
            self.first_epoch, self._is_found, self._num_finished = self.epoch_after(self.num_read), False, 0

    def state(self) -> str:
        with self._changed:
            return self._dump([self.first_epoch, self._is_found, self._num_finished])

    def restore(self, state: str | None) -> None:
        decoded = json.loads(state) if state else {}
        # A state of other data has no parts. Checkpoints of kdist 0.1.0 have two values.
        found = [*decoded.get("found", [0, False]), 0]
        with self._changed:
            self.first_epoch, self._is_found, self._num_finished = found[:3]
            self._wait_with(decoded.get("unread", ()))
        if self.pass_has_ended():
            self.begin_pass()


class FunctionData(TrainingData):
    """A function `(DataContext) -> tf.data.Dataset` of batches, traced for the workers."""

    calls_user_code = True

    def __init__(self, function: Callable[[DataContext], tf.data.Dataset]) -> None:
        self._function = function
        self._name = getattr(function, "__name__", str(function))
        try:
            inspect.signature(function).bind(None)
        except TypeError as error:
            raise ConfigError(
                f"the dataset function {self._name} must take one argument, the context: "
                f"(context) -> tf.data.Dataset ({error})"
            ) from error

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        dataset = self._function(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"the dataset function {self._name} returned {type(dataset).__name__}; it must return a "
                "tf.data.Dataset of batches"
            )
        return _repeated(dataset, context.first_batch)


def _repeated(dataset: tf.data.Dataset, num_read: tf.Tensor | int) -> tf.data.Dataset:
    """`dataset`, repeated endlessly, from the place in a pass after `num_read` elements.

    Elements before that place are read again, at most one pass; without a known length it starts over.
    """
    length = dataset.cardinality()
    place = tf.where(length > 0, tf.cast(num_read, tf.int64) % tf.maximum(length, 1), 0)
    return dataset.repeat().skip(place)
