"""`TrainingData`: what a strategy sees of the data, and `DataContext`: what the data knows of its reader."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kdist.config.schema import ClusterConfig
from kdist.data.columns import Share
from kdist.data.splits import Passes, Splits


@dataclass(frozen=True)
class DataContext:
    """The argument of a dataset function.

    Attributes:
        worker_index: scalar int64 tensor (the function is traced once for all workers), 0 <= index < num_workers.
        batch_size: examples per replica and step, as given to `fit`; None if it was not given.
        first_batch: the number of batches that this worker has read before, in a resumed run; a scalar int64 tensor. If
            the dataset's length is known, kdist continues there by itself.
    """

    worker_index: tf.Tensor
    num_workers: int
    batch_size: int | None
    first_batch: tf.Tensor | int = 0


@dataclass(frozen=True)
class Readers:
    """Who reads the data of a fit, and to what end.

    Attributes:
        number: of workers that read.
        at_once: batches that a step takes in one process.
        replicas: whose batches make one step.
        run_the_program: whether the readers are processes that each run the user's program.
        serve: whether they are tasks that the program calls.
        here: whether this process reads datasets for them: they cannot.
        by_passes: whether epochs end with data of unknown length, which is repeated otherwise.
        steps_per_epoch: of an epoch that ends before; None if it is a pass.
        timeout: seconds that the user's own process may take to make a batch.
    """

    number: int = 1
    at_once: int = 1
    replicas: int = 1
    run_the_program: bool = False
    serve: bool = False
    here: bool = False
    by_passes: bool = False
    steps_per_epoch: int | None = None
    timeout: float = ClusterConfig.step_timeout

    @property
    def num_iterators(self) -> int:
        """How many iterators over the data there are at the same time."""
        return self.number * self.at_once


class TrainingData(abc.ABC):
    """Data for the workers. A strategy traces `dataset` once and runs it on each worker with its `arguments`."""

    #: Whether nobody knows that a task can read it before one has.
    is_untried: bool = False

    def batches_per_pass(self, num_workers: int) -> int | None:
        """Batches of all workers in one pass over the data; None if it is not known, or the data has no end."""
        return None

    @property
    def splits(self) -> Splits | None:
        """The parts that workers read one after the other, of data that may end; None if it is endless."""
        return None

    def state(self) -> str | None:
        """The part of data that may end which was read, as JSON; None of endless data."""
        return None if self.splits is None else self.splits.state()

    @property
    def passes(self) -> Passes | None:
        """The passes that are the epochs, if nobody knows their length; None if epochs are numbers of steps."""
        return None

    @abc.abstractmethod
    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        """What one worker reads, a dataset of batches, endless or of one split; or its split is this one batch.

        Called inside a `tf.function`.
        """

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
