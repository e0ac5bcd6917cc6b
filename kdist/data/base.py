"""The data of a training as strategies see it, `TrainingData`, and the dataset that each worker makes of it.

Every worker repeats its data, so that only the session decides when to stop. With each batch comes a fresh random seed,
for Dropout and the like, derived from `seed` and the worker's index: no random state is shared through a parameter
server.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from kdist._compat.tensorflow import (
    allow_many_next,
    argument_for_task,
    copy_for_tasks,
    forget_traced_functions,
    function_for_tasks,
)
from kdist.config.schema import ClusterConfig
from kdist.data.columns import WorkerArgument
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
    """The readers of the data of a fit.

    Attributes:
        number: of workers that read.
        at_once: batches that a step takes in one process.
        replicas: whose batches make one step.
        run_the_program: the readers are processes that each run the user's program.
        serve: they are tasks that the program calls.
        here: this process reads datasets for them: they cannot.
        by_passes: epochs end with data of unknown length, which is repeated otherwise.
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
        """The number of iterators over the data at the same time."""
        return self.number * self.at_once


class TrainingData(abc.ABC):
    """Data for the workers. A strategy traces `dataset` once and runs it on each worker with its `arguments`."""

    #: The parts that workers read one after the other, of data that may end; None if it is endless.
    splits: Splits | None = None
    #: The passes that are the epochs, if nobody knows their length; None if epochs are numbers of steps.
    passes: Passes | None = None
    #: Its datasets call functions of the user, which AutoGraph converts; of kdist's own it would take a second.
    calls_user_code: ClassVar[bool] = False
    #: Nobody knows that a task can read it before one has.
    is_untried: bool = False
    #: Adds sample weights to a batch, which it takes as its parts; None leaves the weights of the data.
    add_weights: Callable[..., Any] | None = None

    def batches_per_pass(self, num_workers: int) -> int | None:
        """Batches of all workers in one pass over the data; None if it is not known, or the data has no end."""
        return None

    def share_end(self, share: int, num_shares: int, num_passes: int) -> int | None:
        """The number of batches of a share in its first `num_passes` passes; None if nobody knows.

        `dataset` for worker `share` of `num_shares` has these batches, and may begin with any of them.
        """
        return None

    def place_of(self, worker: int, first_step: int, first_batch: int) -> tuple[int, int, int]:
        """The share that a worker reads, the number of its next seeds, and its next batch."""
        return worker, first_step, first_batch

    def forget(self, worker: int | None = None) -> None:  # noqa: B027 - only shares that travel are kept
        """Drops the handles to what was sent to a worker, or to all workers, and is kept for later."""

    def fingerprint(self) -> str | None:
        """Tells it from other data, however it is read; None if nobody knows."""
        return None

    def state(self) -> str | None:
        """The part of data that may end which was read, as JSON; None of endless data."""
        return None if self.splits is None else self.splits.state()

    @abc.abstractmethod
    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        """Makes a worker's batches, inside a `tf.function`: a dataset, endless or of one split; or one batch."""

    def batches(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        """Makes a worker's batches, as `dataset`, with their weights."""
        batches, add = self.dataset(context, *arguments), self.add_weights
        if add is None:
            return batches
        if isinstance(batches, tf.data.Dataset):
            return batches.map(add)
        return add(*batches) if isinstance(batches, tuple) else add(batches)

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        """The specs of the `arguments` of `dataset`."""
        return []

    def trace_transfer(self, num_workers: int) -> None:  # noqa: B027 - not every kind of data needs it
        """Traces what sending the arguments needs; called when the workers have joined."""

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        """The arguments of one worker; shares of arrays are not copied yet.

        Raises `NothingToRead` if there is no split for it now.
        """
        return []


def worker_dataset(
    data: TrainingData, *, num_workers: int, batch_size: int | None, num_seeds: int, seed: int
) -> tf.types.experimental.ConcreteFunction:
    """Traces the function that creates one worker's dataset of `(batch, seeds)`, or this pair; `make_dataset` calls it.

    `seeds` is uint32 `[num_seeds, 2]`, fresh for each batch; different workers and steps never share one.
    """

    def make(worker_index: tf.Tensor, first_step: tf.Tensor, first_batch: tf.Tensor, *arguments: tf.Tensor) -> Any:
        batches = data.batches(DataContext(worker_index, num_workers, batch_size, first_batch), *arguments)

        def seeds(count: tf.Tensor) -> tf.Tensor:
            stream = tf.stack([tf.constant(seed, tf.int64) * num_workers + worker_index, first_step + count])
            return tf.random.stateless_uniform([num_seeds, 2], stream, minval=None, maxval=None, dtype=tf.uint32)

        if not isinstance(batches, tf.data.Dataset):
            return batches, seeds(tf.zeros([], tf.int64))
        dataset = tf.data.Dataset.zip((batches, tf.data.Dataset.counter().map(seeds))).prefetch(2)
        # The thread that tunes a pipeline may sleep through the end of its iterator: TensorFlow wakes it before it
        # marks it as cancelled. Ending a run then took as long as the run itself, up to a minute. Without the tuner,
        # AUTOTUNE means as many parallel calls as there are cores.
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)

    # If the first thing that TensorFlow does in a process is to trace a function, its config is another one.
    tf.config.list_logical_devices()
    forget_traced_functions()
    specs = [*[tf.TensorSpec([], tf.int64)] * 3, *data.specs(num_workers)]
    make = make if data.calls_user_code else tf.autograph.experimental.do_not_convert(make)
    return function_for_tasks(make, *specs, autograph=data.calls_user_code)


def make_dataset(
    make: tf.types.experimental.ConcreteFunction,
    data: TrainingData,
    worker_index: int,
    num_workers: int,
    first_step: int,
    first_batch: int = 0,
) -> Any:
    """The dataset, or pair `(batch, seeds)`, of one worker, on the CPU of the task of the caller, which gets the data.

    Args:
        make: traced by `worker_dataset`.
        first_step: the global step at which the run starts, so that a resumed run does not repeat its random states.
        first_batch: the number of batches that the worker has read by then.
    """
    with tf.device("CPU:0"):
        places = data.place_of(worker_index, first_step, first_batch)
        numbers = [argument_for_task(number, tf.int64) for number in places]
        return call_with(make, *numbers, *data.arguments(worker_index, num_workers))


def call_with(function: tf.types.experimental.ConcreteFunction, *arguments: WorkerArgument) -> Any:
    """Calls a function on the device of the caller, after sending the shares among its arguments there."""
    # Variables are kept until the function has read them.
    sent = [item for a in arguments for item in (a() if callable(a) else [copy_for_tasks(a)])]
    return function(*(item.handle if isinstance(item, tf.Variable) else item for item in sent))


def iterator_over(made: Any) -> Any:
    """The argument of a call that reads from the result of `make_dataset`."""
    if not isinstance(made, tf.data.Dataset):
        return made
    # TensorFlow reads on the CPU of a task alone, also where the caller computes on a GPU.
    with tf.device("CPU:0"):
        return iter(made)


def next_of(iterator: Any) -> Any:
    """The next element of a dataset iterator, while a function is traced; any number of times in one function.

    A pair `(batch, seeds)`, in the place of an iterator, is the only element.
    """
    if isinstance(iterator, tuple):
        return iterator
    allow_many_next(iterator)
    return next(iterator)


def element_spec(make: tf.types.experimental.ConcreteFunction) -> Any:
    """The type specs of `(batch, seeds)`, of the function that `worker_dataset` has traced."""
    made = make.structured_outputs
    is_dataset = isinstance(made, tf.data.Dataset)
    return made.element_spec if is_dataset else tf.nest.map_structure(tf.type_spec_from_value, made)


def iterator_spec(make: tf.types.experimental.ConcreteFunction) -> Any:
    """The type spec of the result of `iterator_over`."""
    spec = element_spec(make)
    return tf.data.IteratorSpec(spec) if isinstance(make.structured_outputs, tf.data.Dataset) else spec


def first_batch_reader(data: TrainingData, num_workers: int, batch_size: int | None) -> Callable[[int], None]:
    """A function by which a worker, given by its index, reads its first batch."""
    make = worker_dataset(data, num_workers=num_workers, batch_size=batch_size, num_seeds=0, seed=0)
    data.trace_transfer(num_workers)
    take = tf.function(next_of, autograph=False).get_concrete_function(iterator_spec(make))
    return lambda worker: take(iterator_over(make_dataset(make, data, worker, num_workers, 0)))
