"""Data that keeps arriving in splits: `SplitSource`, its base class, and `SplitData`, as workers read it."""

from __future__ import annotations

import abc

import tensorflow as tf

from kdist._compat.tensorflow import argument_for_task
from kdist.data.base import DataContext, TrainingData
from kdist.data.columns import WorkerArgument
from kdist.data.python_readers import raised_by_reader
from kdist.data.splits import Split, SplitEnumerator, SplitQueue, UnreadableSplit
from kdist.errors import DataSourceError, reason


class SplitSource(abc.ABC):
    """Data that keeps arriving, as a user describes it; each fit makes a `SplitData` of it."""

    @abc.abstractmethod
    def enumerator(self) -> SplitEnumerator:
        """Finds the splits, on the chief."""

    @abc.abstractmethod
    def batches(self, split: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        """The batches of one split, by its name, string `[]`, without its first `num_read` records, int64 `[]`.

        Traced for the workers. The last batch may have fewer than `batch_size` records.
        """


class SplitData(TrainingData):
    """The splits of a source; a worker's dataset ends with its split, and the next one is another dataset."""

    calls_user_code = True
    splits: SplitQueue

    def __init__(self, source: SplitSource, batch_size: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self.splits = SplitQueue(source.enumerator(), batch_size)

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)]

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        split = self.splits.assign(worker_index)
        return [argument_for_task(split.name), argument_for_task(split.num_read, tf.int64)]

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        split, num_read = arguments
        return self._source.batches(split, num_read, self._batch_size)


def why_unreadable(error: tf.errors.OpError, split: Split) -> str | None:
    """The reason if a split cannot be read; None for another error, as of its records.

    Raises `DataSourceError` if its source cannot be reached.
    """
    if (unreachable := raised_by_reader(error, DataSourceError)) is not None:
        raise DataSourceError(unreachable) from error
    of_file = (tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.FailedPreconditionError)
    # Not only files can be missing.
    is_its = isinstance(error, of_file) and split.name in error.message
    if is_its or isinstance(error, tf.errors.DataLossError):
        return reason(error).splitlines()[0]
    return raised_by_reader(error, UnreadableSplit)


def with_place(error: tf.errors.OpError, split: Split) -> tf.errors.OpError:
    """Adds the place in the data to an error."""
    return type(error)(None, None, f"{split.place}:\n{error.message}")
