"""Embedding tables of kdist beside each other: `python -m benchmarks.tables`, about 8 minutes.

Rates are of runs that alternate, each in a process of its own: a click model with 26 tables, fixed and dynamic; and
ragged ids, pooled by the layer and by hand. The last run fills a dynamic table with 3 million ids, and evicts them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import Figures, measured, run
from benchmarks.workloads import WORKLOADS, compiled_keras_model, dataset

_NUM_IDS, _HOT_IDS, _BATCH, _DIM = 3_000_000, 64, 8192, 16
_FIRST_SWEEP_SECS = 30.0


def clicks(run_dir: str, kind: str) -> Figures:
    """Trains the click model of the Criteo race on 2ps2w; `kind` of tables: `fixed` or `dynamic`."""
    import keras

    import kdist

    workload = WORKLOADS["criteo"]

    def build() -> keras.Model:
        def table(rows: int, units: int) -> keras.layers.Layer:
            if kind == "dynamic":
                return kdist.layers.DynamicEmbedding(units)
            return kdist.layers.Embedding(rows, units)

        return compiled_keras_model(workload, keras, workload.optimizer, table)

    return _rate(kdist.Trainer(build, "2ps2w", run_dir=run_dir), lambda _: dataset(workload), 4000)


def ragged(run_dir: str, kind: str) -> Figures:
    """Trains on 64 examples with 0 to 63 ids each on 2ps2w, pooled by the layer, or by hand (`kind` is `flattened`)."""
    import keras
    import tensorflow as tf

    import kdist

    class Pooled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = kdist.layers.Embedding(200_000, _DIM, combiner="mean" if kind == "ragged" else None)
            self.out = keras.layers.Dense(10)

        def call(self, ids: Any) -> Any:
            if kind == "ragged":
                return self.out(self.table(ids))
            vectors = self.table(ids.flat_values)
            return self.out(tf.math.segment_mean(vectors, ids.value_rowids()))

    def build() -> keras.Model:
        model = Pooled()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def batches(_: kdist.DataContext) -> tf.data.Dataset:
        rng = np.random.default_rng(0)
        # The last of a batch has ids, so that both ways have as many outputs.
        lengths = np.where(np.arange(6400) % 64 == 63, 32, rng.integers(0, 64, 6400))
        ids = tf.RaggedTensor.from_row_lengths(rng.integers(0, 200_000, lengths.sum()), lengths)
        return tf.data.Dataset.from_tensor_slices((ids, np.arange(6400) % 10)).batch(64).repeat().prefetch(2)

    return _rate(kdist.Trainer(build, "2ps2w", run_dir=run_dir), batches, 8000)


def ids(run_dir: str) -> Figures:
    """Fills a dynamic table with Adagrad on 1ps1w, and evicts all but a few ids while training goes on."""
    import keras
    import tensorflow as tf

    import kdist
    from kdist.strategies.sweeper import Sweeper

    Sweeper.pause_secs = _FIRST_SWEEP_SECS
    fill_steps = _NUM_IDS // _BATCH

    def build() -> keras.Model:
        layer = kdist.layers.DynamicEmbedding(_DIM, eviction=kdist.layers.Eviction(unseen_steps=10), name="table")
        pooled = keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.layers.Input((1,), dtype="int64"), layer, pooled, keras.layers.Dense(1)])
        model.compile("adagrad", "mse")
        return model

    def batches(_: kdist.DataContext) -> tf.data.Dataset:
        every = tf.data.Dataset.range(fill_steps).map(lambda n: tf.range(n * _BATCH, (n + 1) * _BATCH))
        hot = tf.data.Dataset.from_tensors(tf.range(_HOT_IDS, dtype=tf.int64)).repeat()
        return every.concatenate(hot).map(lambda of_step: (of_step[:, None], tf.zeros(tf.shape(of_step))))

    class StepByStep(kdist.hooks.Hook):
        def due_in(self, step: int) -> int:
            return 1

    figures: Figures = {"longest_step_ms": 0.0}
    trainer = kdist.Trainer(build, "1ps1w", run_dir=run_dir, steps_per_call=1, export_max_bytes=0, hooks=[StepByStep()])
    with trainer.session(batches, steps=10_000_000, verbose=0) as session:
        strategy: Any = session.strategy
        server = next(pid for task, pid in strategy.pids.items() if str(task).startswith("ps"))
        session.run()
        before = _resident_bytes(server)
        while session.global_step < fill_steps + 10:
            session.run()
        figures["bytes_an_id"] = (_resident_bytes(server) - before) / _NUM_IDS - 2 * 4 * _DIM
        sweeper = strategy._sweeper
        while not sweeper.is_sweeping:
            session.run()
        began = at = time.monotonic()
        while sweeper.is_sweeping:
            session.run()
            at, last = time.monotonic(), at
            figures["longest_step_ms"] = max(figures["longest_step_ms"], 1000 * (at - last))
            figures["steps"] = figures.get("steps", 0) + 1
        figures["sweep_secs"] = at - began
        session.save(keep=1)
        saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(f"{run_dir}/checkpoints"))
        figures["ids_left"] = len(saved.get_tensor("parameters/table/embeddings_ids"))
        session.request_stop("all has been measured")
    return figures


MEASUREMENTS: dict[str, Callable[..., Figures]] = {f.__name__: f for f in (clicks, ragged, ids)}


def _rate(trainer: Any, batches: Any, steps: int) -> Figures:
    trainer.fit(batches, steps=steps, verbose=0)
    return {"steps_per_sec": trainer.result.steps_per_second}


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def _measured(*arguments: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        return measured("benchmarks.tables", arguments[0], folder, *arguments[1:])


def _compare(measurement: str, kinds: tuple[str, str], pairs: int = 3) -> None:
    rates = [[_measured(measurement, kind)["steps_per_sec"] for kind in kinds] for _ in range(pairs)]
    for kind, of_kind in zip(kinds, zip(*rates)):
        print(f"{measurement}, {kind}: {statistics.median(of_kind):.0f} steps/s {[round(rate) for rate in of_kind]}")
    ratios = [rate / other for rate, other in rates]
    print(f"  {kinds[0]} / {kinds[1]}: {statistics.median(ratios):.2f} {[round(r, 2) for r in ratios]}", flush=True)


def main() -> None:
    _compare("clicks", ("dynamic", "fixed"))
    _compare("ragged", ("ragged", "flattened"))
    figures = _measured("ids")
    print(f"{_NUM_IDS} ids: {', '.join(f'{name} {value:.4g}' for name, value in figures.items())}")


if __name__ == "__main__":
    run(MEASUREMENTS, main)
