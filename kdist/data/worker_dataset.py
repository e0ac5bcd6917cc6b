"""What one worker reads: a sequence of batches, each with a fresh random seed.

Every worker repeats its data, so that only the session decides when to stop. The seeds, for Dropout and the like, are
derived from `seed` and the worker's index, so that no random state is shared through a parameter server.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kdist._compat.tensorflow import (
    IteratorSpec,
    allow_many_next,
    copy_for_tasks,
    forget_traced_functions,
    function_for_tasks,
    initialize,
)
from kdist.data.base import DataContext, TrainingData
from kdist.data.columns import Share


def worker_dataset(
    data: TrainingData,
    *,
    num_workers: int,
    batch_size: int | None,
    num_seeds: int,
    seed: int,
) -> tf.types.experimental.ConcreteFunction:
    """Traces the function that creates one worker's dataset of `(batch, seeds)`, or this pair; `make_dataset` calls it.

    `seeds` is uint32 `[num_seeds, 2]`, fresh for each batch; different workers and steps never share one.
    """

    def make(worker_index: tf.Tensor, first_step: tf.Tensor, first_batch: tf.Tensor, *arguments: tf.Tensor) -> Any:
        batches = data.dataset(DataContext(worker_index, num_workers, batch_size, first_batch), *arguments)

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
    initialize()
    forget_traced_functions()
    specs = [*[tf.TensorSpec([], tf.int64)] * 3, *data.specs(num_workers)]
    return function_for_tasks(make, *specs, autograph=True)


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
        make: what `worker_dataset` has traced.
        first_step: the global step at which the run starts, so that a resumed run does not repeat its random states.
        first_batch: how many batches the worker has read by then.
    """
    with tf.device("CPU:0"):
        numbers = [tf.constant(number, tf.int64) for number in (worker_index, first_step, first_batch)]
        return call_with(make, *numbers, *data.arguments(worker_index, num_workers))


def call_with(function: tf.types.experimental.ConcreteFunction, *arguments: tf.Tensor | Share) -> Any:
    """Calls a function on the device of the caller, after sending the shares among its arguments there."""
    # Variables are kept until the function has read them.
    sent = [item for a in arguments for item in (a.send() if isinstance(a, Share) else [copy_for_tasks(a)])]
    return function(*(item.handle if isinstance(item, tf.Variable) else item for item in sent))


def iterator_over(made: Any) -> Any:
    """What a call takes to read what `make_dataset` has made."""
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
    """The type spec of what `iterator_over` returns."""
    spec = element_spec(make)
    return IteratorSpec(spec) if isinstance(make.structured_outputs, tf.data.Dataset) else spec
