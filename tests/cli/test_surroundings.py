"""A run survives what surrounds it: no standard streams, a reader that ends, proxies, and flags of XLA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from helpers import result_of

pytestmark = pytest.mark.cluster
STEPS = 300
RUN = ["-m", "kdist", "+recipe=linear", f"train.steps={STEPS}", "run.dir=run"]
#: Trains a model with tables of both kinds, random numbers and a dataset that has constants to fold.
TABLES = """
import sys
import keras, numpy as np, tensorflow as tf
import kdist

ids, more = keras.Input((4,), dtype="int64"), keras.Input((2,), dtype="int64")
rows = kdist.layers.DynamicEmbedding(3)(ids), keras.layers.Embedding(100, 3)(more), keras.layers.Embedding(100, 3)(more)
x = keras.layers.Concatenate()([keras.layers.Flatten()(of_table) for of_table in rows])
x = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "relu")(x))
model = keras.Model([ids, more], keras.layers.Dense(1)(x))
model.compile("adam", "mse", metrics=["mae"])
random = np.random.default_rng(0)
inputs = random.integers(0, 10**9, (256, 4)), random.integers(0, 100, (256, 2))
dataset = tf.data.Dataset.from_tensor_slices((inputs, np.ones((256, 1), "float32"))).repeat().batch(16)
noisy = dataset.map(lambda x, y: (x, y + tf.random.stateless_normal([16, 1], [1, 2]) / tf.sqrt(tf.constant(4.0))))
trainer = kdist.Trainer(model, run_dir="run", **dict(text.split("=") for text in sys.argv[1:]))
trainer.fit(noisy, steps=20, validation_data=(inputs, np.ones((256, 1), "float32")))
assert trainer.predict(inputs, verbose=0).shape == (256, 1)
"""


def run(*arguments: str, cwd: Path, **options: object) -> int:
    command = [sys.executable, *RUN, *arguments]
    done = subprocess.run(command, cwd=cwd, timeout=200, check=False, **options)  # type: ignore[call-overload]
    return int(done.returncode)


def check_is_done(folder: Path) -> None:
    result = result_of(folder / "run")
    assert (result["status"], result["global_step"]) == ("done", STEPS)
    assert "done  | step" in (folder / "run" / "logs" / "chief-0.log").read_text(encoding="utf-8")


def test_nobody_reads_its_console(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run("cluster=1ps1w", cwd=tmp_path, env=environment(), stdout=writing, stderr=writing) == 0
    finally:
        os.close(writing)
    check_is_done(tmp_path)


@pytest.mark.long
def test_it_has_no_standard_streams(tmp_path: Path) -> None:
    script = f'exec "{sys.executable}" {" ".join(RUN)} cluster=1ps1w <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment(), timeout=120, check=False)
    assert done.returncode == 0
    check_is_done(tmp_path)


@pytest.mark.parametrize(
    ("variable", "cluster"),
    [
        ("https_proxy", "1ps1w"),
        pytest.param("grpc_proxy", "1ps1w", marks=pytest.mark.long),
        pytest.param("http_proxy", "2w", marks=pytest.mark.long),
    ],
)
def test_a_proxy_that_knows_nothing_of_this_machine(variable: str, cluster: str, tmp_path: Path) -> None:
    proxies = {**environment(), variable: "http://127.0.0.1:9"}
    assert run(f"cluster={cluster}", "cluster.start_timeout=40", cwd=tmp_path, env=proxies) == 0
    check_is_done(tmp_path)


XLA = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"}


@pytest.mark.parametrize("cluster", ["1ps1w", pytest.param("2w", marks=pytest.mark.long)])
def test_xla_clusters_the_operations_of_tasks(cluster: str, tmp_path: Path) -> None:
    assert run(f"cluster={cluster}", cwd=tmp_path, env={**environment(), **XLA}) == 0
    check_is_done(tmp_path)


#: A library that sets the clock of a process 50 minutes forward and back, every four seconds.
CLOCK = """
#define _GNU_SOURCE
#include <time.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    struct timespec passed;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &passed);
    int code = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += passed.tv_sec / 4 % 2 * 3000;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}
"""
#: A hook that lets steps take so long that servers hear of the chief less often than the clock is set.
SLOW = """
import time
from kdist.hooks import Hook

class Slow(Hook):
    def due_in(self, step):
        return 1

    def after_run(self, context, values):
        time.sleep(1.5)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc")
def test_a_clock_that_is_set_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    (tmp_path / "slow.py").write_text(SLOW)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "clock.so", "clock.c"], cwd=tmp_path, timeout=60, check=True)
    variables = {**environment(), "LD_PRELOAD": str(tmp_path / "clock.so")}
    hook = ["+hooks.slow._target_=slow.Slow", "run.trust=[slow]", "train.steps_per_call=1", "train.steps=40"]
    assert run("cluster=1ps1w", "strategy=sync_replicas", *hook, cwd=tmp_path, env=variables) == 0
    result = result_of(tmp_path / "run")
    assert (result["status"], result["global_step"]) == ("done", 40)
    assert result["restarts"] == {"worker": 0, "cluster": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    "cluster", [["cluster=1ps1w"], ["cluster=2ps2w", "strategy=sync_replicas"], ["cluster=local"]], ids=" ".join
)
def test_xla_and_the_rows_of_tables(cluster: list[str], tmp_path: Path) -> None:
    program = [sys.executable, "-c", TABLES, *cluster]
    flags = {**environment(), **XLA}
    done = subprocess.run(program, cwd=tmp_path, env=flags, timeout=200, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "run")["global_step"] == 20
