"""`DatasetPasses`: a dataset of unknown length, read in passes: one ends when all workers have read their parts."""

from __future__ import annotations

import json
import math
from typing import Any

import tensorflow as tf

from kdist.data.base import DataContext, TrainingData
from kdist.data.columns import Share
from kdist.data.serialization import dataset_graph, dataset_of_graph, uses_libraries
from kdist.data.splits import SplitEnumerator, SplitQueue


class DatasetPasses(TrainingData):
    """A `tf.data.Dataset` of batches. A split is every n-th batch of a pass over it.

    Args:
        dataset: its graph is sent to the workers.
        num_parts: of a pass, one for each worker.
    """

    def __init__(self, dataset: tf.data.Dataset, num_parts: int) -> None:
        self._element_spec = dataset.element_spec
        self._graph = dataset_graph(dataset, num_parts)
        self.is_untried = uses_libraries(self._graph)
        self._queue = PassQueue(num_parts)

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
        pass_number: of the present pass, from 0.
        is_found: whether its parts were found.
    """

    place = "the dataset"
    poll_secs = 0.0
    idle_secs = math.inf
    ended_by = None

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self.pass_number = 0
        self.is_found = False

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
        return [self.pass_number, self.is_found]

    def restore(self, state: Any) -> None:
        self.pass_number, self.is_found = state


class PassQueue(SplitQueue):
    """Hands out the parts of a pass, and those of the next one when it is begun.

    Args:
        num_parts: of a pass.
    """

    arrive = False
    is_only_pass = False

    def __init__(self, num_parts: int) -> None:
        self._passes = PassEnumerator(num_parts)
        # What was read of a part is counted in batches.
        super().__init__(self._passes, batch_size=1)

    @property
    def pass_number(self) -> int:
        return self._passes.pass_number

    def pass_has_ended(self) -> bool:
        with self._lock:
            return self._passes.is_found and not self._waiting and not self._reading

    def begin_pass(self) -> None:
        self._passes.restore([self.pass_number + 1, False])

    def skip(self, worker: int, reason: str) -> bool:
        return False

    def restore(self, state: str | None) -> None:
        is_of_passes = state is not None and "found" in json.loads(state)
        super().restore(state if is_of_passes else json.dumps({"found": [0, False], "unread": []}))
        if self.pass_has_ended():
            self.begin_pass()
