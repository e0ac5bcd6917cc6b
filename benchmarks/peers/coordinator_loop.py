"""A loop of one's own over `ClusterCoordinator`, as in TensorFlow's tutorial on parameter servers, with tf_keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from benchmarks.peers import parameter_server_strategy
from benchmarks.peers.task import STEPS_AT_ONCE, Task, race, this_task
from benchmarks.workloads import compiled_keras_model, dataset


def main(task: Task) -> None:
    strategy = parameter_server_strategy.connected(task)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = compiled_keras_model(task.what, tf_keras, task.optimizer)
        accuracy = tf_keras.metrics.SparseCategoricalAccuracy()
    loss_of = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(batch: Any) -> None:
        x, labels = batch
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(loss_of(labels, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(labels, logits)

    iterator = iter(coordinator.create_per_worker_dataset(tf.function(lambda: dataset(task.what))))
    num_steps = parameter_server_strategy.steps_between_joins(task)

    def running(at_once: int) -> Callable[[], int]:
        @tf.function
        def steps(iterator: Any) -> None:
            for _ in tf.range(at_once):
                strategy.run(replica_step, args=(next(iterator),))

        def run() -> int:
            for _ in range(num_steps // at_once):
                coordinator.schedule(steps, args=(iterator,))
            coordinator.join()
            return num_steps

        return run

    race(task, {at_once: running(at_once) for at_once in STEPS_AT_ONCE if at_once <= num_steps})


if __name__ == "__main__":
    main(this_task())
