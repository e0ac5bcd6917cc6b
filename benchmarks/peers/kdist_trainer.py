"""kdist: default hooks, `steps_per_call=auto`. With the option `arrays`, as most users call it: `fit` of arrays."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kdist
from benchmarks.peers.task import Task, this_task
from benchmarks.preparation import Preparation
from benchmarks.progress import PREPARED
from benchmarks.workloads import compiled_keras_model, dataset

# Of arrays: an epoch is short, so that its end counts.
_BATCHES_PER_EPOCH = 100
# Few runs are shorter. It says which lengths of calls will have been worth their while in the end.
_STEPS = 100_000


class Counted(kdist.hooks.Hook):
    """Says how far training is, and when its calls have their length."""

    def __init__(self, task: Task) -> None:
        self._progress = task.counter()
        self._prepared = task.folder / PREPARED
        self._preparation: Preparation | None = Preparation()

    def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
        self._progress.set(context.session.global_step)
        if self._preparation is not None and self._preparation.is_over_after(values):
            self._prepared.touch()
            self._preparation = None


def main(task: Task) -> None:
    options = dict(task.options)
    slowed, of_arrays = options.pop("slow_last_worker", 1.0), options.pop("arrays", False)

    def batches(context: kdist.DataContext) -> Any:
        is_last = context.worker_index == context.num_workers - 1
        return dataset(task.what, tf.where(is_last, tf.constant(slowed), 1.0))

    trainer = kdist.Trainer(
        lambda: compiled_keras_model(task.what, keras, task.optimizer, kdist.layers.Embedding),
        cluster=f"{task.num_ps}ps{task.num_workers}w" if task.num_ps else f"{task.num_workers}w",
        strategy="auto" if not task.num_ps else "sync_replicas" if task.sync else "parameter_server",
        run_dir=task.folder / "run",
        hooks=[Counted(task)],
        **options,
    )
    if of_arrays:
        x, y = (np.concatenate([*each] * 4)[: _BATCHES_PER_EPOCH * task.what.batch_size] for each in task.what.arrays())
        trainer.fit(x, y, batch_size=task.what.batch_size, steps=_STEPS)
        return
    if not task.num_ps:
        trainer.fit(batches, steps=_STEPS, verbose=0)
        return
    with trainer.session(batches, steps=_STEPS, verbose=0) as session:
        while not session.should_stop():
            session.run()
            if not (task.folder / "save_secs").exists():
                session.strategy.drain()
                started = time.monotonic()
                session.save(keep=1)
                (task.folder / "save_secs").write_text(str(time.monotonic() - started))


if __name__ == "__main__":
    main(this_task())
