"""Models, data and clusters that are large: `python -m benchmarks.large`, about 10 minutes.

Each row is a run in a process of its own. Memory is the largest resident size of a task; first step: from the start of
Python to the end of the first step, of which the first run is the last part; all times in seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured import Figures, measured, peak_bytes, run

_STARTED = time.monotonic()
_WIDTH = 64
_FEATURES = 784


def table(run_dir: str, rows: str, cluster: str, steps: str, validate: str = "") -> Figures:
    """Trains a table of `rows` x 64 with Adagrad, and saves it at the end only."""
    import keras

    import kdist

    def build() -> keras.Model:
        layers = [keras.layers.Input((8,), dtype="int64"), kdist.layers.Embedding(int(rows), _WIDTH)]
        model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    x = np.random.default_rng(0).integers(0, int(rows), (20_000, 8))
    y = (x.sum(1) % 7).astype(np.float32)
    watch = _watching_hook()
    savers = [kdist.hooks.CheckpointSaver(every_secs=1e6, keep=1, listeners=[watch.listener])]
    trainer = kdist.Trainer(build, cluster, run_dir=run_dir, hooks=[watch, *savers], export_max_bytes=0)
    given: Figures = {"validation_data": (x, y), "validation_every_steps": 20} if validate else {}
    trainer.fit(x, y, batch_size=64, steps=int(steps), verbose=0, **given)
    return watch.figures


def arrays(run_dir: str, cluster: str, path: str = "") -> Figures:
    """Trains on 1 000 000 x 784 float32, in memory or in a file."""
    import keras

    import kdist

    shape = (1_000_000, _FEATURES)
    x = np.load(path, mmap_mode="r") if path else np.ones(shape, np.float32)
    model = keras.Sequential([keras.layers.Input((_FEATURES,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5), "mse")
    watch, began = _watching_hook(), time.monotonic()
    trainer = kdist.Trainer(model, cluster, run_dir=run_dir, hooks=[watch])
    trainer.fit(x, np.zeros(len(x), np.float32), batch_size=64, steps=200, verbose=0)
    return {**watch.figures, "first_step": watch.first_step_at - began}


def many_workers(run_dir: str, cluster: str, strategy: str, steps: str) -> Figures:
    """Trains a small model on many workers."""
    import keras

    import kdist

    model = keras.Sequential(
        [keras.layers.Input((_FEATURES,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).random((6400, _FEATURES), np.float32)
    watch = _watching_hook()
    trainer = kdist.Trainer(model, cluster, strategy, run_dir=run_dir, hooks=[watch])
    trainer.fit(x, np.arange(6400) % 10, batch_size=8, steps=int(steps), verbose=0)
    return {**watch.figures, "ready": watch.ready_at - _STARTED, "steps_per_sec": trainer.result.steps_per_second}


MEASUREMENTS: dict[str, Callable[..., Figures]] = {f.__name__: f for f in (table, arrays, many_workers)}


def _watching_hook() -> Any:
    """A hook that notes when things happen, and how large tasks become."""
    import kdist

    class Listener(kdist.hooks.CheckpointSaverListener):
        def before_save(self, session: Any, global_step: int) -> None:
            self.began = time.monotonic()

        def after_save(self, session: Any, global_step: int) -> None:
            watch.figures["save"] = time.monotonic() - self.began

    class Watch(kdist.hooks.Hook):
        def __init__(self) -> None:
            self.figures: Figures = {}
            self.listener = Listener()
            self.ready_at = self.first_step_at = 0.0
            self._ended_at = 0.0
            self._validations: list[float] = []

        def after_create_session(self, session: Any) -> None:
            self.ready_at = time.monotonic()

        def after_run(self, context: Any, values: Any) -> None:
            self._ended_at = time.monotonic()
            if not self.first_step_at:
                self.first_step_at = self._ended_at
                self.figures |= {"first_step": self.first_step_at - _STARTED, "first_run": values.seconds}

        def due_in(self, step: int) -> int:
            return 1 if not self.first_step_at else 1_000_000

        def after_validation(self, session: Any, logs: Any) -> None:
            self._validations.append(time.monotonic() - self._ended_at)
            # The first one is traced.
            self.figures["validation"] = sorted(self._validations[1:] or self._validations)[
                len(self._validations) // 2 - 1
            ]

        def end(self, session: Any) -> None:
            sizes = {"chief": peak_bytes(os.getpid())}
            for task, pid in session.strategy.pids.items():
                job = str(task).partition(":")[0]
                sizes[job] = max(sizes.get(job, 0), peak_bytes(pid))
            self.figures |= {f"{job}_gb": size / 1e9 for job, size in sizes.items()}

    watch = Watch()
    return watch


@contextmanager
def _rows() -> Iterator[Iterator[tuple[str, list[str]]]]:
    """A measurement: its name, and the arguments of the process; `{}` is a new run dir, `{n}` that of row n."""
    with tempfile.TemporaryDirectory() as folder:

        def rows() -> Iterator[tuple[str, list[str]]]:
            for name, size in (("1 GB", "2000000"), ("5 GB", "10000000")):
                run_dir = f"{folder}/{size}"
                yield f"{name} of state, 2ps2w", ["table", run_dir, size, "2ps2w", "50"]
                yield f"{name} of state, resumed on 3ps2w", ["table", run_dir, size, "3ps2w", "100"]
            for workers in (2, 4):
                cluster = f"2ps{workers}w"
                run_dir = f"{folder}/validation-{workers}"
                yield (
                    f"1 000 000 x 64, validated on {cluster}",
                    ["table", run_dir, "1000000", cluster, "100", "validate"],
                )
            path = Path(folder, "x.npy")
            for cluster in ("2ps2w", "1ps1w"):
                yield f"3 GB of arrays, {cluster}", ["arrays", f"{folder}/arrays-{cluster}", cluster]
            mapped = np.lib.format.open_memmap(path, "w+", np.float32, (1_000_000, _FEATURES))
            mapped.flush()
            del mapped
            yield "3 GB in a file, 2ps2w", ["arrays", f"{folder}/file", "2ps2w", str(path)]
            path.unlink()
            yield "sync_replicas, 1ps32w", ["many_workers", f"{folder}/sync", "1ps32w", "sync_replicas", "40"]
            yield "parameter_server, 1ps64w", ["many_workers", f"{folder}/async", "1ps64w", "parameter_server", "3000"]

        yield rows()


def main() -> None:
    columns = [
        "ready",
        "first_step",
        "first_run",
        "save",
        "validation",
        "steps_per_sec",
        "chief_gb",
        "ps_gb",
        "worker_gb",
    ]
    lines = [f"| | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    with _rows() as rows:
        for name, arguments in rows:
            if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
                continue
            figures = measured("benchmarks.large", *arguments)
            cells = [f"{figures[column]:.2f}" if column in figures else "" for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    run(MEASUREMENTS, main)
