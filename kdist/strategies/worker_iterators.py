"""The iterators over the data of each worker, made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from kdist.cluster.spec import Task
from kdist.data.split_data import naming, why_unreadable
from kdist.data.splits import Splits
from kdist.data.worker_dataset import iterator_over
from kdist.dispatch.coordinator import Coordinator
from kdist.dispatch.worker_threads import may_be_lost

T = TypeVar("T")


class WorkerIterators:
    """Iterators on workers.

    Args:
        make_dataset: worker -> its dataset, on the device of the caller.
        device_of: worker -> the device of its iterator; None for that of the caller.
    """

    def __init__(
        self,
        make_dataset: Callable[[int], Any],
        device_of: Callable[[int], str | None] = lambda worker: Task("worker", worker).device,
    ) -> None:
        self._make_dataset = make_dataset
        self._device_of = device_of
        self._iterators: dict[int, Any] = {}

    def of(self, worker: int) -> Any:
        """The iterator of a worker."""
        if worker not in self._iterators:
            with tf.device(self._device_of(worker)):
                self._iterators[worker] = iterator_over(self._make_dataset(worker))
        return self._iterators[worker]

    def read(self, worker: int, splits: Splits | None, call: Callable[[Any], T]) -> T:
        """Calls a function with the iterator of a worker, which continues with its next split at the end of one.

        Args:
            splits: of the data; None if it is endless.
            call: reads exactly one batch if there are splits.

        Raises:
            NothingToRead: there is no split for the worker now.
            DataSourceError: the source of the split cannot be reached.
            tf.errors.OpError: from `call`; it names the split.
        """
        if splits is None:
            return call(self.of(worker))
        while True:
            if splits.split_of(worker) is None:
                self.forget(worker)
            try:
                result = call(self.of(worker))
            except tf.errors.OutOfRangeError:
                splits.finish(worker)
            except tf.errors.OpError as error:
                split = splits.split_of(worker)
                if split is None or may_be_lost(error):
                    raise
                if (reason := why_unreadable(error, split)) is None or not splits.skip(worker, reason):
                    raise naming(error, split) from error
            else:
                splits.advance(worker)
                if splits.split_of(worker) is None:
                    # It was this one batch.
                    self.forget(worker)
                return result

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
