"""The bytes that servers hold and send, by the plan and as measured: `python -m benchmarks.sizing`, 11 minutes.

Each row is a run in a process, and a network, of its own. Bytes of a step are all that the loopback device
receives, protocols, calls and logs included; memory is the largest resident size that the fullest server has had.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.isolated import bytes_received, prefix
from benchmarks.measured import Figures, measured, peak_bytes, run
from benchmarks.workloads import NUM_COUNTS, WORKLOADS, Clicks, Embedding, Workload, compiled_keras_model, dataset

_STEPS_PER_CALL = 16
_WARM_UP_STEPS, _STEPS = 8 * _STEPS_PER_CALL, 10 * _STEPS_PER_CALL
_TABLE = Workload("table", "2 000 000 x 64", (16,), (Embedding(2_000_000, 64),), 256, "int32", "adagrad")
_RUNS: dict[str, tuple[Workload, str, str]] = {
    "MLP 784-100-10, SGD": (WORKLOADS["mlp"], "2ps2w", ""),
    "2 x 4096, SGD": (WORKLOADS["wide"], "2ps2w", ""),
    "the same on 2ps4w": (WORKLOADS["wide"], "2ps4w", ""),
    "2 x 4096, bfloat16 in transit": (WORKLOADS["wide"], "2ps2w", "bfloat16"),
    "table of 2 000 000 x 64, Adagrad": (_TABLE, "2ps2w", ""),
    "the same on 4ps2w": (_TABLE, "4ps2w", ""),
    "Criteo, 26 tables x 16, Adagrad": (WORKLOADS["criteo"], "2ps2w", ""),
}


def compare(name: str, run_dir: str) -> Figures:
    """Trains, and compares the plan with what is seen."""
    import keras

    import kdist

    workload, cluster, wire_dtype = _RUNS[name]
    options: Figures = {"wire_dtype": wire_dtype} if wire_dtype else {}
    trainer = kdist.Trainer(
        lambda: compiled_keras_model(workload, keras, workload.optimizer, kdist.layers.Embedding),
        cluster,
        "parameter_server",
        run_dir=run_dir,
        steps_per_call=_STEPS_PER_CALL,
        export_max_bytes=0,
        **options,
    )
    pid = os.getpid()
    with trainer.session(lambda _: dataset(workload), verbose=0) as session:
        plan = session.strategy.plan
        assert plan is not None
        begin = _train_to(session, _WARM_UP_STEPS)
        before = bytes_received(pid)
        end = _train_to(session, begin + _STEPS)
        moved = (bytes_received(pid) - before) / (end - begin)
        largest = max(peak_bytes(pid) for task, pid in session.strategy.pids.items() if task.job == "ps")
        began = time.monotonic()
        session.save(keep=1)
        save_secs = time.monotonic() - began
    tables = (variable.name for variable in plan.variables if not variable.travels)
    numbers = dict(zip(tables, _distinct_ids(workload)))
    of_servers = plan.step_bytes(lambda table: numbers[table.name])
    return {
        "planned_step": sum(map(sum, of_servers)),
        "step": moved,
        "planned_server": max(plan.memory_by_server),
        "server": largest,
        "save": save_secs,
    }


def _train_to(session: Any, step: int) -> int:
    """Trains to a step or somewhat further; returns the step that the servers are at, when nothing is in flight."""
    while session.global_step < step:
        session.run()
    session.strategy.drain()
    return int(session.strategy.values.global_step())


def _distinct_ids(workload: Workload) -> list[float]:
    """The mean number of different ids of a batch, by table."""
    inputs, _ = workload.arrays()
    if not workload.ids_per_example:
        return []
    # Batches of columns of ids, each of a table: `[batches, tables, ids]`.
    ids = inputs[:, :, NUM_COUNTS:].swapaxes(1, 2) if isinstance(workload.layers[0], Clicks) else inputs[:, np.newaxis]
    return list(np.mean([[len(np.unique(of_table)) for of_table in batch] for batch in ids], 0))


def main() -> None:
    if not prefix():
        raise SystemExit("the bytes of a run cannot be told from others': this system permits no network namespaces")
    print("| | step, planned (MB) | seen (MB) | | fullest server, planned (GB) | seen (GB) | | save (s) |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in _RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found = measured("benchmarks.sizing", name, str(Path(folder, "run")), before=prefix())
        print(
            f"| {name} | {found['planned_step'] / 1e6:.3g} | {found['step'] / 1e6:.3g} "
            f"| {found['step'] / found['planned_step']:.2f} | {found['planned_server'] / 1e9:.2f} "
            f"| {found['server'] / 1e9:.2f} | {found['server'] / found['planned_server']:.2f} | {found['save']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    run({name: partial(compare, name) for name in _RUNS}, main)
