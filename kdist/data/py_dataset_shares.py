"""`PyDatasetShares`: a `PyDataset` in several processes that run the program, each of which makes its own batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist.data.base import DataContext, TrainingData
from kdist.data.batch_source import BatchSource
from kdist.data.shuffled_batches import ShuffledBatches


class PyDatasetShares(TrainingData):
    """Every process has a copy of the data set, and each replica makes every n-th batch of it, by its number.

    Args:
        dataset: of known length; its batches must depend on their numbers only.
        seed: of the order of the batches, which is the same in all processes; None keeps it.
    """

    def __init__(self, dataset: keras.utils.PyDataset, *, seed: int | None) -> None:
        self._dataset = ShuffledBatches(dataset, seed)
        self._source = BatchSource(dataset)
        self._spec = self._source.element_spec
        self._pass: int | None = None

    def batches_per_pass(self, num_workers: int) -> int:
        return len(self._dataset)

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
            pass_number, number = divmod(index, len(self._dataset))
            with lock:
                # Replicas of one process share the data set.
                self._enter(pass_number)
                batch = self._dataset.index_of(number)
            yield tuple(self._source.tensors(batch, self._dataset.at(batch)))

    def _enter(self, pass_number: int) -> None:
        if self._pass is not None and pass_number <= self._pass:
            return
        if self._pass is not None:
            self._dataset.on_epoch_end()
        self._pass = pass_number
        self._dataset.enter(pass_number)
        self._dataset.on_epoch_begin()
