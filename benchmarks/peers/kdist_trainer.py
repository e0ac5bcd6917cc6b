"""kdist, as anyone would call it: default hooks, `steps_per_call=auto`."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

import kdist
from benchmarks.peers.task import Task, this_task
from benchmarks.workloads import compiled_keras_model, dataset

# Few runs are shorter. It says which lengths of calls will have been worth their while in the end.
_STEPS = 100_000


class Counted(kdist.hooks.Hook):
    """Says how far training is that has no session in this process."""

    def __init__(self, task: Task) -> None:
        self._progress = task.counter()

    def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
        self._progress.set(context.session.global_step)


def main(task: Task) -> None:
    options = dict(task.options)
    slowed = options.pop("slow_last_worker", 1.0)

    def batches(context: kdist.DataContext) -> Any:
        is_last = context.worker_index == context.num_workers - 1
        return dataset(task.what, tf.where(is_last, tf.constant(slowed), 1.0))

    trainer = kdist.Trainer(
        lambda: compiled_keras_model(task.what, keras, task.optimizer, kdist.layers.Embedding),
        cluster=f"{task.num_ps}ps{task.num_workers}w" if task.num_ps else f"{task.num_workers}w",
        strategy="auto" if not task.num_ps else "sync_replicas" if task.sync else "parameter_server",
        run_dir=task.folder / "run",
        hooks=() if task.num_ps else [Counted(task)],
        **options,
    )
    if not task.num_ps:
        trainer.fit(batches, steps=_STEPS, verbose=0)
        return
    progress = task.counter()
    with trainer.session(batches, steps=_STEPS, verbose=0) as session:
        while not session.should_stop():
            session.run()
            progress.set(session.global_step)
            if not (task.folder / "save_secs").exists():
                session.strategy.drain()
                started = time.monotonic()
                session.save(keep=1)
                (task.folder / "save_secs").write_text(str(time.monotonic() - started))


if __name__ == "__main__":
    main(this_task())
