"""What one worker reads, step by step: full batches without end, and a fresh random seed with each.

Every worker repeats its data and draws full batches from it, so that a step always sees `batch_size` examples and only
the session decides when to stop. The seeds, for Dropout and the like, are drawn from `seed` and the worker's index, so
nothing random is shared over a parameter server.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import IteratorSpec

from kdist.data import DataContext, TrainingData


def worker_dataset(
    data: TrainingData,
    *,
    num_workers: int,
    batch_size: int | None,
    num_seeds: int,
    seed: int,
) -> tf.types.experimental.ConcreteFunction:
    """Traces the function that makes one worker's dataset of `(batch, seeds)`.

    `seeds` is uint32 `[num_seeds, 2]`, fresh for each batch.

    Args:
        seed: where the random states start; different workers and steps never share one.

    Returns:
        A concrete function of what `worker_arguments` returns.
    """

    def make(
        worker_index: tf.Tensor, first_step: tf.Tensor, first_batch: tf.Tensor, *arguments: tf.Tensor
    ) -> tf.data.Dataset:
        batches = data.dataset(DataContext(worker_index, num_workers, batch_size, first_batch), *arguments)

        def seeds(count: tf.Tensor) -> tf.Tensor:
            stream = tf.stack([tf.constant(seed, tf.int64) * num_workers + worker_index, first_step + count])
            return tf.random.stateless_uniform([num_seeds, 2], stream, minval=None, maxval=None, dtype=tf.uint32)

        dataset = tf.data.Dataset.zip((batches, tf.data.Dataset.counter().map(seeds))).prefetch(2)
        # The thread that tunes a pipeline may sleep through the end of its iterator: TensorFlow wakes it before it
        # marks it as cancelled. Ending a run then took as long again as the run had, up to a minute. Without the
        # tuner, AUTOTUNE means as many parallel calls as there are cores.
        options = tf.data.Options()
        options.autotune.enabled = False
        return dataset.with_options(options)

    specs = [tf.TensorSpec([], tf.int64)] * 3
    for argument in data.arguments(0, num_workers):
        # Shards differ in length by one.
        shape = argument.shape if argument.shape.rank == 0 else [None, *argument.shape[1:]]
        specs.append(tf.TensorSpec(shape, argument.dtype))
    return tf.function(make, input_signature=specs).get_concrete_function()


def worker_arguments(
    data: TrainingData, worker_index: int, num_workers: int, first_step: int, first_batch: int = 0
) -> tuple[Any, ...]:
    """Arguments of the function that `worker_dataset` traced, for one worker.

    Args:
        first_step: the global step that the run starts at, so that a resumed run does not repeat its random states.
        first_batch: how many batches the worker has read by then.
    """
    numbers = [tf.constant(number, tf.int64) for number in (worker_index, first_step, first_batch)]
    return (*numbers, *data.arguments(worker_index, num_workers))


def next_of(iterator: Any) -> Any:
    """The next element of a dataset iterator, while a function is traced.

    TensorFlow takes more than 32 of these in one function for a Python loop that should have been a graph's.
    """
    iterator._get_next_call_count = 0
    return next(iterator)


def iterator_spec(make_dataset: tf.types.experimental.ConcreteFunction) -> IteratorSpec:
    """The type spec of iterators over the dataset that `make_dataset` returns."""
    return IteratorSpec(make_dataset.structured_outputs.element_spec)
