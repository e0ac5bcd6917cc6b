"""One process, no cluster: `keras.Model.fit` with the best of a few `steps_per_execution`. What the machine can do."""

from __future__ import annotations

import keras

from benchmarks.peers.fit_race import race_fit
from benchmarks.peers.task import STEPS_AT_ONCE, Task, this_task
from benchmarks.workloads import compiled_keras_model, dataset


def main(task: Task) -> None:
    # An epoch is about a second, so that its end costs nothing.
    steps = {"wide": 20, "criteo": 20, "cnn": 200}.get(task.workload, 500)

    def fit(at_once: int, callbacks: list[keras.callbacks.Callback]) -> None:
        model = compiled_keras_model(task.what, keras, task.optimizer)
        model.compile(optimizer=model.optimizer, loss=model.loss, metrics=["accuracy"], steps_per_execution=at_once)
        model.fit(dataset(task.what), epochs=10**9, steps_per_epoch=steps, verbose=0, callbacks=callbacks)

    race_fit(task, keras, fit, steps, [at_once for at_once in STEPS_AT_ONCE if at_once <= steps])


if __name__ == "__main__":
    main(this_task())
