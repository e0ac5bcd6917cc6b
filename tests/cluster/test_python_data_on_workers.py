"""Data that only the chief can read, on real servers: every batch is used once over all workers, whoever is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import counted
import keras
import models
import numpy as np
import pytest
import python_data
import tensorflow as tf
from helpers import in_short
from python_data import Batches

import kdist
from kdist._compat.tensorflow import offer_python_function
from kdist.cluster.spec import Task
from kdist.errors import ConfigError, TaskError
from kdist.hooks import CheckpointSaver, Hook

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

EYE = np.eye(counted.NUM_RECORDS, dtype=np.float32)
NUM_BATCHES = 23


def numbered(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten records; of the last batch, three."""
    return EYE[10 * number : min(10 * number + 10, 223)], np.zeros(10 if number < 22 else 3, np.float32)


class Numbered(keras.utils.PyDataset):
    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, number: int) -> Any:
        return numbered(number)


def generated() -> Iterator[Any]:
    yield from map(numbered, range(NUM_BATCHES))


def unknown_length() -> tf.data.Dataset:
    return tf.data.Dataset.range(223).filter(lambda i: i >= 0).map(lambda i: (tf.one_hot(i, 1000), 0.0)).batch(10)


def times(number: int) -> np.ndarray:
    return np.where(np.arange(counted.NUM_RECORDS) < 223, number, 0)


@pytest.mark.parametrize(
    "make", in_short([Batches, python_data.filtered, python_data.with_python_function], {python_data.filtered})
)
@pytest.mark.filterwarnings("ignore:.*is read in this process")
def test_one_worker_gives_the_same_numbers_as_keras(make: Any, run_dir: Path) -> None:
    ours, theirs = models.mlp("sgd"), models.mlp("sgd")
    theirs.set_weights(ours.get_weights())
    expected = theirs.fit(make(), epochs=2, verbose=0, shuffle=False)
    trainer = kdist.Trainer(lambda: ours, "1ps1w", run_dir=run_dir)
    history = trainer.fit(make(), epochs=2, verbose=0, shuffle=False)
    assert (history.epoch, history.history.keys()) == ([0, 1], expected.history.keys())
    for key, values in expected.history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-4, err_msg=key)
    np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*is read in this process")
def test_sparse_matrices_travel(run_dir: Path) -> None:
    def build() -> keras.Model:
        layers = [keras.layers.Input((6,), sparse=True), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential(layers)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    ours, theirs = build(), build()
    theirs.set_weights(ours.get_weights())
    x, y = python_data.sparse_matrix(), python_data.Y
    theirs.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    kdist.Trainer(lambda: ours, "1ps1w", run_dir=run_dir).fit(x, y, batch_size=8, verbose=0, shuffle=False)
    np.testing.assert_allclose(ours.get_weights()[0], theirs.get_weights()[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("sync_replicas", marks=pytest.mark.long)])
@pytest.mark.parametrize(("make", "epochs"), [pytest.param(generated, 1, marks=pytest.mark.long), (unknown_length, 2)])
@pytest.mark.filterwarnings("ignore:.*is read in this process")
def test_every_batch_is_used_once_per_epoch(make: Any, epochs: int, strategy: str, run_dir: Path) -> None:
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", strategy, run_dir=run_dir)
    history = trainer.fit(make(), epochs=epochs, verbose=0)
    np.testing.assert_array_equal(counted.counts(trainer.model), times(epochs))
    assert history.epoch == list(range(epochs))
    assert trainer.result.examples == epochs * 223


class Kill(Hook):
    """Kills a task when a step is reached."""

    def __init__(self, task: Task, step: int) -> None:
        self._task, self._step = task, step
        self._is_done = False

    def after_run(self, context: Any, values: Any) -> None:
        if not self._is_done and values.global_step >= self._step:
            self._is_done = True
            os.kill(context.session.strategy.pids[self._task], signal.SIGKILL)

    def due_in(self, step: int) -> int | None:
        return None if self._is_done else max(1, self._step - step)


@pytest.mark.filterwarnings("ignore:.*(is read in this process|worker.1)")
def test_the_batch_of_a_lost_worker_goes_to_another_one(run_dir: Path) -> None:
    trainer = kdist.Trainer(counted.counting_model, "1ps2w", run_dir=run_dir, hooks=[Kill(Task("worker", 1), 4)])
    trainer.fit(generated(), verbose=0)
    counts = counted.counts(trainer.model)
    assert counts[:223].min() >= 1
    assert counts[223:].max() == 0
    # Of what a lost worker had begun the servers may have got the update.
    assert counts.sum() - 223 <= 10 * trainer.result.extra_steps


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parameter_server", "sync_replicas"])
@pytest.mark.filterwarnings("ignore:.*(is read in this process|ps.0 died)")
def test_a_cluster_that_is_restarted_continues_where_its_checkpoint_was(strategy: str, run_dir: Path) -> None:
    def trained_on(data: Any, name: str) -> np.ndarray:
        hooks = [Kill(Task("ps", 0), 8), CheckpointSaver(every_steps=5)]
        trainer = kdist.Trainer(counted.counting_model, "2ps2w", strategy, run_dir=run_dir / name, hooks=hooks)
        trainer.fit(data, verbose=0)
        assert trainer.result.restarts["cluster"] == 1
        return counted.counts(trainer.model)

    # The last of 12 synchronous steps takes a batch of the next pass.
    more = trained_on(Numbered(), "again") - times(1)
    assert more.min() == 0
    assert more.sum() <= (10 if strategy == "sync_replicas" else 0)
    # What a generator has made since the checkpoint is gone.
    counts = trained_on(generated(), "once")
    assert counts.max() == 1
    assert counts.sum() > 100


class Deadly(keras.layers.Layer):
    """Kills the process that computes it for record 75, as a bug in an op does."""

    def call(self, x: Any) -> Any:
        def die() -> tf.Tensor:
            with tf.control_dependencies([tf.raw_ops.Abort(error_msg="deadly")]):
                return tf.constant(0.0)

        return x + tf.cond(tf.reduce_any(x[:, 75] > 0), die, lambda: tf.constant(0.0))


def deadly_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((counted.NUM_RECORDS,)), Deadly(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("sync_replicas", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*(is read in this process|worker.[01] (is back|died .*restarting)|connecting)")
def test_a_batch_that_kills_workers_is_named_and_ends_training(strategy: str, run_dir: Path) -> None:
    trainer = kdist.Trainer(deadly_model, "1ps2w", strategy, run_dir=run_dir)
    place = r"batch 7 of the PyDataset Numbered, in the call after step \d+"
    with (
        pytest.warns(UserWarning, match=rf"died \(signal 6, SIGABRT\); 2 losses in a row at the same place: {place}\n"),
        pytest.raises(TaskError, match=rf"^worker:[01]: {place}: .*died \(signal 6, SIGABRT\); 3 losses in a row at"),
    ):
        trainer.fit(Numbered(), shuffle=False, verbose=0)
    assert trainer.result.status == "failed"


def test_an_error_of_the_users_code_ends_the_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.hooks.data_position._warned_of", set())
    trainer = kdist.Trainer(models.mlp, "1ps2w", run_dir=run_dir)
    with (
        pytest.warns(UserWarning, match=r"the PyDataset Batches is read in this process, which sends every batch"),
        pytest.raises(TaskError, match=r"^chief: batch 4 of the PyDataset Batches .*LookupError: no such file"),
    ):
        trainer.fit(Batches(fails_at=4), shuffle=False, verbose=0)
    assert trainer.result.status == "failed"


@pytest.mark.parametrize(
    ("cluster", "options"),
    [pytest.param("2w", {}, marks=pytest.mark.long), ("local", {"strategy": "mirrored", "devices": 2})],
    ids=["2w", "mirrored"],
)
def test_all_reduce_workers_use_every_batch_once(cluster: str, options: Any, run_dir: Path) -> None:
    trainer = kdist.Trainer(counted.counting_model, cluster, run_dir=run_dir, **options)
    history = trainer.fit(Numbered(), epochs=2, verbose=0)
    # 24 batches in 12 steps, the last one of the next epoch.
    assert trainer.result.global_step == 24
    assert history.epoch == [0, 1]
    counts = counted.counts(trainer.model)[:223]
    assert counts.min() >= 2
    assert counts.sum() <= 2 * 223 + 20


def test_a_generator_is_refused_where_every_worker_runs_the_program(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, "2w", run_dir=run_dir)
    with pytest.raises(ConfigError, match=r"^x is the generator generated, which lives in one process, and with strat"):
        trainer.fit(generated(), verbose=0)


def test_this_process_reads_what_a_task_cannot(run_dir: Path) -> None:
    """That it has all that the graph needs shows when a task runs it: here, a function with a name of this process."""
    labels = tf.Variable(python_data.Y[:8])

    def only_here(_: np.ndarray) -> np.ndarray:
        return python_data.X[:8]

    def function(context: kdist.DataContext) -> tf.data.Dataset:
        def example(number: tf.Tensor) -> Any:
            (x,) = tf.raw_ops.PyFunc(input=[number], token="only_here", Tout=[tf.float32])
            return tf.ensure_shape(x, [8, 6]), labels.read_value()

        return tf.data.Dataset.range(7).map(example)

    offer_python_function("only_here", only_here)
    trainer = kdist.Trainer(models.mlp, "1ps1w", run_dir=run_dir)
    with pytest.warns(UserWarning, match="the workers cannot read the data, so this process reads it for them: .*only"):
        trainer.fit(function, epochs=2, verbose=0)
    assert trainer.result.global_step == 14


OP = """
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
using namespace tensorflow;
REGISTER_OP("KdistDouble").Input("x: float").Output("y: float");
struct Double : OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Tensor* y;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(0).shape(), &y));
    y->flat<float>() = 2.0f * context->input(0).flat<float>();
  }
};
REGISTER_KERNEL_BUILDER(Name("KdistDouble").Device(DEVICE_CPU), Double);
"""
PROGRAM = """
import sys
import numpy as np, tensorflow as tf
import kdist, models
if sys.argv[1] == "module":
    from doubling import ops
else:
    ops = tf.load_op_library("./libdoubling.so")

def function(context):
    return tf.data.Dataset.from_tensors((np.ones((8, 6), np.float32), np.zeros(8))).repeat(7).map(
        lambda x, y: (tf.ensure_shape(ops.kdist_double(x=x), [8, 6]), y))

for cluster in sys.argv[2:]:
    for x in function(None), function:
        trainer = kdist.Trainer(models.mlp, cluster)
        trainer.fit(x, steps=14, verbose=0)
        print(trainer.result.global_step, "steps")
"""


@pytest.mark.long
def test_ops_of_a_library_are_loaded_by_the_tasks_or_used_here(tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("there is no compiler")
    (tmp_path / "doubling.cc").write_text(OP)
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "doubling.cc", "-o", "libdoubling.so", *flags]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    (tmp_path / "doubling.py").write_text('import tensorflow as tf\nops = tf.load_op_library("./libdoubling.so")\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for loaded_by, clusters in (("module", ["2ps2w", "2w"]), ("program", ["1ps1w"])):
        arguments = [sys.executable, "program.py", loaded_by, *clusters]
        done = subprocess.run(
            arguments, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.stdout.count("14 steps") == 2 * len(clusters), done.stderr
        assert ("the workers cannot read the data" in done.stderr) == (loaded_by == "program")
