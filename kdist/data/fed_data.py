"""`FedData`: batches that this process makes and hands to the workers, one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from kdist.data.base import DataContext, Readers, TrainingData
from kdist.data.batch_source import BatchSource
from kdist.data.columns import Share
from kdist.data.feed_queue import FeedQueue


class FedData(TrainingData):
    """What a `BatchSource` makes; a worker is sent one batch at a time.

    Args:
        source: makes the batches.
        readers: who gets them.
    """

    def __init__(self, source: BatchSource, readers: Readers) -> None:
        self.source = source
        self._readers = readers
        self._spec = source.element_spec
        if source.num_batches is not None:
            self._readers = replace(readers, by_passes=False)

    def batches_per_pass(self, num_workers: int) -> int | None:
        return self.source.num_batches

    @cached_property
    def _queue(self) -> FeedQueue:
        return FeedQueue(self.source, self._readers)

    @property
    def splits(self) -> FeedQueue:
        return self._queue

    @property
    def passes(self) -> FeedQueue | None:
        return self._queue if self._readers.by_passes else None

    def __getstate__(self) -> dict[str, Any]:
        # A queue belongs to its process.
        return {key: value for key, value in vars(self).items() if key not in ("_queue", "source")}

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return tf.nest.flatten(self._spec, expand_composites=True)

    def arguments(self, worker_index: int, num_workers: int) -> list[tf.Tensor | Share]:
        return list(self._queue.assign(worker_index).tensors)

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        # A dataset of one batch would take ten times as long to make.
        return tf.nest.pack_sequence_as(self._spec, arguments, expand_composites=True)
