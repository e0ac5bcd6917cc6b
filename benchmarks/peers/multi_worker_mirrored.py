"""Keras 2 (tf_keras): `fit` under `MultiWorkerMirroredStrategy`: synchronous, by all-reduce, without servers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

import tensorflow as tf
import tf_keras

from benchmarks.peers.fit_race import race_fit
from benchmarks.peers.task import STEPS_AT_ONCE, Task, limit_threads, run_processes, this_task, with_addresses
from benchmarks.workloads import compiled_keras_model, dataset


def train(task: Task) -> None:
    """One worker."""
    os.environ["TF_CONFIG"] = json.dumps({"cluster": task.jobs, "task": {"type": "worker", "index": task.index}})
    limit_threads()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    steps = 50
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def per_worker(_: Any) -> Any:
        return dataset(task.what).with_options(options)

    def fit(at_once: int, callbacks: list[Any]) -> None:
        with strategy.scope():
            model = compiled_keras_model(task.what, tf_keras, task.optimizer)
            model.compile(optimizer=model.optimizer, loss=model.loss, metrics=["accuracy"], steps_per_execution=at_once)
        batches = strategy.distribute_datasets_from_function(per_worker)
        model.fit(batches, epochs=10**9, steps_per_epoch=steps, verbose=0, callbacks=callbacks)

    def choose(rates: dict[int, float]) -> int:
        """All workers have to take what the first one says."""
        said = task.folder / "chosen"
        if task.index == 0:
            said.with_suffix(".new").write_text(str(max(rates, key=lambda at_once: rates[at_once])))
            said.with_suffix(".new").rename(said)
        while not said.exists():
            time.sleep(0.05)
        return int(said.read_text())

    race_fit(task, tf_keras, fit, steps, [at_once for at_once in STEPS_AT_ONCE if at_once <= steps], choose)


if __name__ == "__main__":
    run_processes(train, with_addresses(replace(this_task(), num_ps=0)))
