"""The iterators over the data of each worker, made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.cluster.spec import Task
from kdist.dispatch.coordinator import Coordinator


class WorkerIterators:
    """Iterators on workers.

    Args:
        make_dataset: worker -> its dataset, on the device of the caller.
    """

    def __init__(self, make_dataset: Callable[[int], tf.data.Dataset]) -> None:
        self._make_dataset = make_dataset
        self._iterators: dict[int, Any] = {}

    def of(self, worker: int) -> Any:
        """The iterator of a worker."""
        if worker not in self._iterators:
            with tf.device(Task("worker", worker).device):
                self._iterators[worker] = iter(self._make_dataset(worker))
        return self._iterators[worker]

    def of_all(self, workers: Sequence[int], coordinator: Coordinator) -> list[Any]:
        """The iterators of several idle workers, each of which makes its own meanwhile.

        Raises:
            tf.errors.OpError: a worker is lost, or its data cannot be read.
        """
        missing = [worker for worker in workers if worker not in self._iterators]
        for worker in missing:
            coordinator.start_on(worker, self.of)
        for finished in [coordinator.next_finished() for _ in missing]:
            finished.outcome.result()
        return [self._iterators[worker] for worker in workers]

    def forget(self, worker: int) -> None:
        """Drops the iterator of a worker: its data starts over."""
        self._iterators.pop(worker, None)

    def clear(self) -> None:
        """Drops them all."""
        self._iterators.clear()
