"""The CPU time of a small step: `python -m benchmarks.small_steps`, about 2 minutes; needs Linux's `perf`.

An MLP trains by `fit` of arrays with default hooks, while `perf` samples all cores. Each sample belongs to a job of the
cluster by its process, and to a kind of work by its thread, library and function. Figures are microseconds of CPU for
each step.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import keras
import numpy as np

import kdist
from benchmarks.measured import Figures, measured, run
from benchmarks.preparation import Preparation
from benchmarks.workloads import WORKLOADS, compiled_keras_model

_RUNS = (("2ps2w", "parameter_server"), ("2ps2w", "sync_replicas"), ("2w", "auto"), ("local", "auto"))
_BATCHES_PER_EPOCH = 100
_MEASURED_SECS = 5.0
_SAMPLES_PER_SEC = 997
#: What no cluster spends more on is not shown.
_LEAST_MICROS = 10
_IDLE = "idle"
#: The first one that fits the thread, function and library of a sample says what it was spent on.
_KINDS = (
    (_IDLE, r"^swapper"),
    ("arithmetic", r"perf-\d+\.map|dnnl|gemm|Eigen::(internal::|Tensor)|functor::"),
    ("copies", r"mem(move|cpy|set)|copy_(to|from)_iter|copy_user|clear_page"),
    ("network", r"^event_engine|grpc|protobuf|tcp|skb|sock|inet|\bip_|loopback|net_rx|netif|epoll|sendmsg|recvmsg"),
    ("memory", r"malloc|_int_free|cfree|unlink_chunk|operator (new|delete)|page_fault|free_pages|rmqueue|mmap|calloc"),
    ("threads", r"futex|sched|finish_task_switch|spin_unlock|ThreadPoolTempl|RunQueue|EventCount|Mutex|CondVar|wake"),
    ("Python", r"libpython"),
    ("TensorFlow", r"libtensorflow"),
)
_OTHER = "kernel and others"


def profile(run_dir: str, cluster: str, strategy: str) -> Figures:
    """CPU microseconds of a step by job and kind of work, and the steps per second."""
    workload = WORKLOADS["mlp"]
    x, y = (np.concatenate([*each] * 4)[: _BATCHES_PER_EPOCH * workload.batch_size] for each in workload.arrays())
    steps: list[tuple[float, int]] = []
    sampled: dict[str, str] = {}

    class Samples(kdist.hooks.Hook):
        def after_create_session(self, session: kdist.hooks.Session) -> None:
            self._pids = {**session.strategy.pids}
            self._preparation = Preparation()
            self._perf: threading.Thread | None = None

        def after_run(self, context: kdist.hooks.RunContext, values: kdist.hooks.RunValues) -> None:
            if not self._preparation.is_over_after(values):
                return
            steps.append((time.monotonic(), values.global_step))
            if self._perf is None:
                self._perf = threading.Thread(target=sample)
                self._perf.start()
            elif not self._perf.is_alive():
                sampled.update({str(pid): task.job for task, pid in self._pids.items()})
                context.request_stop("measured")

    def sample() -> None:
        record = ["perf", "record", "-a", "-F", f"{_SAMPLES_PER_SEC}", "-e", "cpu-clock", "-o", f"{run_dir}.perf"]
        subprocess.run([*record, "--", "sleep", f"{_MEASURED_SECS}"], check=True, capture_output=True)

    trainer = kdist.Trainer(
        lambda: compiled_keras_model(workload, keras, workload.optimizer, kdist.layers.Embedding),
        cluster,
        strategy=strategy,
        run_dir=run_dir,
        hooks=[Samples()],
    )
    trainer.fit(x, y, batch_size=workload.batch_size, steps=10**6, verbose=0)
    (began, first), (ended, last) = steps[0], steps[-1]
    found = Counter(f"{job}: {kind}" for job, kind in _samples(f"{run_dir}.perf", sampled))
    rate = (last - first) / (ended - began)
    # Idle cores have samples, too.
    micros_of_sample = (os.cpu_count() or 1) / rate / found.total() * 1e6
    return {"steps_per_second": rate, **{name: number * micros_of_sample for name, number in found.items()}}


def _samples(path: str, jobs: dict[str, str]) -> list[tuple[str, str]]:
    """The job and the kind of work of each sample."""
    script = ["perf", "script", "-i", path, "-F", "comm,pid,ip,sym,dso"]
    lines = subprocess.run(script, check=True, capture_output=True, text=True, errors="replace").stdout.splitlines()
    found = []
    for line in lines:
        if (fields := re.match(r"\s*(.+?)\s+(\d+)\s+[0-9a-f]+ (.*)", line)) is None:
            continue
        thread, pid, function = fields.groups()
        # Code that oneDNN generates is in a library `perf-<pid>.map`.
        text = f"{thread} {re.sub('[(].*/', '(', function)}"
        kind = next((kind for kind, pattern in _KINDS if re.search(pattern, text)), _OTHER)
        own = "chief" if pid == str(os.getpid()) else "other processes"
        found.append(("" if kind == _IDLE else jobs.get(pid, own), kind))
    return found


def main() -> None:
    if shutil.which("perf") is None:
        sys.exit("python -m benchmarks.small_steps needs perf: apt install linux-perf")
    columns: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (cluster, strategy) in enumerate(_RUNS):
            figures = measured("benchmarks.small_steps", "profile", str(Path(folder) / f"{number}"), cluster, strategy)
            columns[f"{cluster}, {strategy}"] = figures
            print(f"{cluster}, {strategy}: {figures.pop('steps_per_second'):.0f} steps/s", flush=True)
    print("| |", " | ".join(columns), "|\n| --- |", " ---: |" * len(columns))
    for job in ("worker", "ps", "chief"):
        for kind in (*(kind for kind, _ in _KINDS[1:]), _OTHER):
            micros = [figures.get(f"{job}: {kind}", 0.0) for figures in columns.values()]
            if max(micros) >= _LEAST_MICROS:
                print(f"| {job}: {kind} |", " | ".join(f"{each:.0f}" for each in micros), "|")
    print("| idle |", " | ".join(f"{figures.get(f': {_IDLE}', 0.0):.0f}" for figures in columns.values()), "|")


if __name__ == "__main__":
    run({"profile": profile}, main)
