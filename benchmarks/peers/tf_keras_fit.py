"""Keras 2 (tf_keras): `fit` under `ParameterServerStrategy`, with the best of a few `steps_per_execution`."""

from __future__ import annotations

import tf_keras

from benchmarks.peers import parameter_server_strategy
from benchmarks.peers.fit_race import race_fit
from benchmarks.peers.task import STEPS_AT_ONCE, Task, this_task
from benchmarks.workloads import compiled_keras_model, dataset


def main(task: Task) -> None:
    strategy = parameter_server_strategy.connected(task)
    steps = parameter_server_strategy.steps_between_joins(task)

    def fit(at_once: int, callbacks: list[object]) -> None:
        with strategy.scope():
            model = compiled_keras_model(task.what, tf_keras, task.optimizer)
            model.compile(optimizer=model.optimizer, loss=model.loss, metrics=["accuracy"], steps_per_execution=at_once)
        creator = tf_keras.utils.experimental.DatasetCreator(lambda _: dataset(task.what))
        model.fit(creator, epochs=10**9, steps_per_epoch=steps, verbose=0, callbacks=callbacks)

    race_fit(task, tf_keras, fit, steps, [at_once for at_once in STEPS_AT_ONCE if at_once <= steps])


if __name__ == "__main__":
    main(this_task())
