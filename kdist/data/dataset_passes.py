"""`DatasetPasses`: a dataset of unknown length, read in passes: one ends when all workers have read their parts."""

from __future__ import annotations

import json
import math
from typing import Any

import tensorflow as tf

from kdist.data.base import DataContext, TrainingData
from kdist.data.columns import Share
from kdist.data.serialization import dataset_graph, dataset_of_graph, uses_libraries
from kdist.data.splits import Passes, SplitEnumerator, SplitQueue


class DatasetPasses(TrainingData):
    """A `tf.data.Dataset` of batches. A split is every n-th batch of a pass over it.

    Args:
        dataset: its graph is sent to the workers.
        num_parts: of a pass, one for each worker.
        steps_per_epoch: see `Passes`.
    """

    def __init__(self, dataset: tf.data.Dataset, num_parts: int, steps_per_epoch: int | None = None) -> None:
        self._element_spec = dataset.element_spec
        self._graph = dataset_graph(dataset, num_parts)
        self.is_untried = uses_libraries(self._graph)
        self._queue = PassQueue(num_parts, steps_per_epoch)

    @property
    def splits(self) -> PassQueue:
        return self._queue

    @property
    def passes(self) -> PassQueue:
        return self._queue

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.string), *[tf.TensorSpec([], tf.int64)] * 3]

    def arguments(self, worker_index: int, num_workers: int) -> list[tf.Tensor | Share]:
        split = self._queue.assign(worker_index)
        part, num_parts = PassEnumerator.part_of(split.name)
        return [self._graph, *(tf.constant(number, tf.int64) for number in (part, num_parts, split.num_read))]

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        graph, part, num_parts, num_read = arguments
        return dataset_of_graph(graph, self._element_spec).shard(num_parts, part).skip(num_read)


class PassEnumerator(SplitEnumerator):
    """Finds the parts of one pass after the other.

    Args:
        num_parts: of a pass.

    Attributes:
        first_epoch: the number, from 0, of the epoch with which the present pass has begun.
        is_found: whether its parts were found.
        num_finished: batches of those that were read to their end.
    """

    place = "the dataset"
    poll_secs = 0.0
    idle_secs = math.inf
    ended_by = None

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self.begin_pass(0)

    def begin_pass(self, first_epoch: int) -> None:
        """Lets the parts be found again, for the pass that begins with an epoch."""
        self.first_epoch, self.is_found, self.num_finished = first_epoch, False, 0

    @staticmethod
    def part_of(name: str) -> tuple[int, int]:
        """The number of a part, from 0, and how many there are. A resumed run may have others for its next pass."""
        _, part, _, num_parts = name.split()
        return int(part) - 1, int(num_parts)

    def discover(self) -> list[str]:
        if self.is_found:
            return []
        self.is_found = True
        return [f"part {i} of {self._num_parts}" for i in range(1, self._num_parts + 1)]

    def state(self) -> Any:
        return [self.first_epoch, self.is_found, self.num_finished]

    def restore(self, state: Any) -> None:
        self.begin_pass(state[0])
        # Checkpoints of kdist 0.1.0 have two values.
        self.is_found, self.num_finished = (*state[1:], 0)[:2]


class PassQueue(SplitQueue, Passes):
    """Hands out the parts of a pass, and those of the next one when it is begun.

    Args:
        num_parts: of a pass.
        steps_per_epoch: see `Passes`.
    """

    arrive = False
    is_only_pass = False

    def __init__(self, num_parts: int, steps_per_epoch: int | None = None) -> None:
        self._passes = PassEnumerator(num_parts)
        self.steps_per_epoch = steps_per_epoch
        # What was read of a part is counted in batches.
        super().__init__(self._passes, batch_size=1)

    @property
    def first_epoch(self) -> int:  # type: ignore[override]
        return self._passes.first_epoch

    @property
    def num_read(self) -> int:
        with self._lock:
            return self._passes.num_finished + sum(p.num_read for p in (*self._waiting, *self._reading.values()))

    def finish(self, worker: int) -> None:
        with self._lock:
            if split := self._reading.pop(worker, None):
                self._passes.num_finished += split.num_read

    def pass_has_ended(self) -> bool:
        with self._lock:
            return self._passes.is_found and not self._waiting and not self._reading

    def begin_pass(self) -> None:
        self._passes.begin_pass(self.epoch_after(self.num_read))

    def skip(self, worker: int, reason: str) -> bool:
        return False

    def restore(self, state: str | None) -> None:
        is_of_passes = state is not None and "found" in json.loads(state)
        super().restore(state if is_of_passes else json.dumps({"found": [0, False], "unread": []}))
        if self.pass_has_ended():
            self.begin_pass()
