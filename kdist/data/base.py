"""`TrainingData`: what a strategy sees of the data, and `DataContext`: what the data knows of its reader."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import tensorflow as tf

from kdist.data.columns import Share
from kdist.data.splits import SplitQueue


@dataclass(frozen=True)
class DataContext:
    """The argument of a dataset function.

    Attributes:
        worker_index: scalar int64 tensor (the function is traced once for all workers), 0 <= index < num_workers.
        batch_size: examples per replica and step, as given to `fit`; None if it was not given.
        first_batch: how many batches this worker has read before, in a resumed run; a scalar int64 tensor. If the
            dataset's length is known, kdist continues there by itself.
    """

    worker_index: tf.Tensor
    num_workers: int
    batch_size: int | None
    first_batch: tf.Tensor | int = 0


class TrainingData(abc.ABC):
    """Data for the workers. A strategy traces `dataset` once and runs it on each worker with its `arguments`."""

    #: Steps (of one batch each) in one pass over the data; None if it is not known.
    steps_per_epoch: int | None = None

    #: The parts that workers read one after the other, if the data keeps arriving; None if it is endless.
    splits: SplitQueue | None = None

    @abc.abstractmethod
    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        """The dataset of one worker's batches: endless, or of one split; called inside a `tf.function`."""

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        """What `dataset` takes as `arguments`."""
        return []

    def trace_transfer(self, num_workers: int) -> None:  # noqa: B027 - not every kind of data needs it
        """Traces what sending the arguments needs; called when the workers have joined."""

    def arguments(self, worker_index: int, num_workers: int) -> list[tf.Tensor | Share]:
        """The arguments of one worker; shares of arrays are not copied yet.

        Raises:
            NothingToRead: there is no split for it now.
        """
        return []
