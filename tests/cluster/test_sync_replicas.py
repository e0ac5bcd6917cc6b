"""Synchronous updates on real TensorFlow servers: who is waited for, what is dropped, what becomes of a quorum."""

import gc
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import delayed, result_of, tags_of, toy_batches, toy_data
from tensorflow.python.eager import context as tf_context

import kdist
from kdist._compat.first_call_lock import first_calls
from kdist.dispatch.connection import reconnect
from kdist.hooks import CheckpointSaver, Hook, SummarySaver
from kdist.parameters.store import UpdateCounters
from kdist.strategies import in_graph
from kdist.strategies.in_graph import InGraphSyncCalls

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

SLOW_WORKER, SLOW_SECS = 2, 0.25


class Notes(Hook):
    """Notes the staleness of every update, and what became of gradients."""

    def __init__(self) -> None:
        self.staleness: list[int] = []
        self.accepted: list[int] = []

    def after_run(self, context: Any, values: Any) -> None:
        self.staleness += values.staleness.tolist()
        self.accepted.append(sum(counts.accepted for counts in values.gradient_counts.values()))


def with_a_slow_worker(context: kdist.DataContext) -> tf.data.Dataset:
    """Batches of `toy_data`; those of one worker take their time."""
    return delayed(toy_batches(), tf.where(tf.equal(context.worker_index, SLOW_WORKER), SLOW_SECS, 0.0))


@pytest.mark.alone
def test_a_backup_worker_lets_the_others_leave_a_slow_one_behind(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes()
    trainer = kdist.Trainer(
        models.mlp,
        cluster="1ps3w",
        strategy="sync_replicas",
        backup_workers=1,
        run_dir=run_dir,
        hooks=[notes, SummarySaver(every_steps=20)],
    )
    trainer.fit(with_a_slow_worker, steps=100)
    result = result_of(run_dir)
    assert (result["status"], result["global_step"]) == ("done", 100)
    assert result["examples"] == 100 * 2 * 8
    # No gradient of older parameters was applied, and each update had two.
    assert notes.staleness == [0] * 100
    assert sum(notes.accepted) == 200
    assert result["gradients"]["staleness_max"] == 0
    by_worker = result["gradients"]["by_worker"]
    slow = by_worker.pop(f"worker:{SLOW_WORKER}")
    assert slow["dropped"] == slow["stale"] >= 1
    assert result["gradients"]["dropped"] == slow["dropped"] + sum(counts["dropped"] for counts in by_worker.values())
    assert sum(counts["accepted"] for counts in by_worker.values()) + slow["accepted"] == 200
    assert slow["accepted"] < 50
    # The rate is that of the others, and not one update for each batch of the slow one.
    assert result["steps_per_second"] > 2 / SLOW_SECS
    assert {f"sync/{what}/worker_{i}" for what in ("accepted", "dropped", "stale") for i in range(3)} <= tags_of(
        run_dir / "tb" / "train"
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sync  | worker:")]
    assert [line.split(" | ")[1] for line in lines] == ["worker:0", "worker:1", "worker:2"]


def test_more_replicas_than_workers_are_several_batches_of_each(run_dir: Path) -> None:
    x, y = toy_data(256)

    def build() -> keras.Model:
        keras.utils.set_random_seed(2)
        return models.mlp(keras.optimizers.SGD(0.1, momentum=0.9))

    def train(cluster: str, batch_size: int, **options: Any) -> list[np.ndarray]:
        trainer = kdist.Trainer(build, cluster=cluster, run_dir=run_dir / cluster, **options)
        trainer.fit(x, y, batch_size=batch_size, steps=12, shuffle=False, verbose=0)
        return trainer.model.get_weights()

    ours = train("1ps2w", 8, strategy="sync_replicas", replicas_to_aggregate=4)
    for mine, expected in zip(ours, train("local", 32)):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_the_tokens_of_tf1_go_to_whoever_is_fast(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(
        models.mlp,
        cluster="1ps2w",
        strategy="sync_replicas",
        replicas_to_aggregate=3,
        token_mode="tf1",
        run_dir=run_dir,
    )
    trainer.fit(x, y, batch_size=8, steps=40, verbose=0)
    gradients = result_of(run_dir)["gradients"]
    accepted = [counts["accepted"] for counts in gradients["by_worker"].values()]
    assert sum(accepted) == 3 * 40
    assert gradients["dropped"] == 0


@pytest.mark.long
def test_the_end_of_data_on_one_worker_lowers_the_quorum(run_dir: Path) -> None:
    def half_empty(context: kdist.DataContext) -> tf.data.Dataset:
        # One worker is in the middle of a read when the end of the other's data is found, which cancels the read.
        batches = delayed(toy_batches(), 0.2)
        return batches.take(tf.where(tf.equal(context.worker_index, 0), np.int64(-1), np.int64(0)))

    trainer = kdist.Trainer(models.mlp, cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir)
    with pytest.warns(UserWarning, match=r"worker:1 has no more data; 1 gradients make an update"):
        trainer.fit(half_empty, steps=20, verbose=0)
    result = result_of(run_dir)
    assert (result["status"], result["global_step"]) == ("done", 20)
    assert result["gradients"]["by_worker"] == {"worker:0": {"accepted": 20, "dropped": 0, "stale": 0}}


def test_a_backup_worker_takes_the_place_of_one_that_is_killed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_alone = []

    def reconnect_alone(*arguments: Any) -> None:
        was_alone.append(bool(first_calls._alone))
        reconnect(*arguments)

    monkeypatch.setattr("kdist.dispatch.coordinator.reconnect", reconnect_alone)

    class KillOne(Hook):
        def after_run(self, context: Any, values: Any) -> None:
            if values.global_step == 10:
                cluster = context.session.strategy
                os.kill(next(pid for task, pid in cluster.pids.items() if str(task) == "worker:1"), signal.SIGKILL)

        def due_in(self, step: int) -> int | None:
            return 10 - step if step < 10 else None

    x, y = toy_data()
    trainer = kdist.Trainer(
        models.mlp, cluster="1ps3w", strategy="sync_replicas", backup_workers=1, run_dir=run_dir, hooks=[KillOne()]
    )
    with pytest.warns(UserWarning, match="worker:1 died"):
        trainer.fit(x, y, batch_size=8, steps=60, verbose=0)
    assert result_of(run_dir)["global_step"] == 60
    # No fetch began while the connection changed.
    assert was_alone
    assert all(was_alone)


class FreesAFunction(Hook):
    """Frees a function while a worker is stopped, and trains on."""

    def __init__(self) -> None:
        self.state, self.was_kept, self.is_kept, self.are_kept = "", False, True, True

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step != 10:
            return
        unused = tf.function(lambda: tf.constant(1)).get_concrete_function()
        strategy, name = context.session.strategy, unused.name
        (worker,) = (pid for task, pid in strategy.pids.items() if str(task) == "worker:1")
        # A thread of this process could not continue it: it would wait for Python's lock.
        later = subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {worker}"])
        os.kill(worker, signal.SIGSTOP)
        del unused
        gc.collect()
        self.state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(worker, signal.SIGCONT)
        later.terminate()
        later.wait()
        self.was_kept = tf_context.context().has_function(name)
        strategy._running().before_tracing()
        self.is_kept = tf_context.context().has_function(name)
        names = [tf.function(lambda: tf.constant(2)).get_concrete_function().name for _ in range(101)]
        gc.collect()
        strategy._running().check_tasks()
        self.are_kept = any(map(tf_context.context().has_function, names))

    def due_in(self, step: int) -> int | None:
        return 10 - step if step < 10 else None


def test_a_function_that_is_freed_waits_for_no_worker_that_is_stopped(run_dir: Path) -> None:
    x, y = toy_data()
    hook = FreesAFunction()
    trainer = kdist.Trainer(models.mlp, cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir, hooks=[hook])
    trainer.fit(x, y, batch_size=8, steps=20, verbose=0)
    assert hook.state == "T"
    # All tasks remove it when all of them respond: before they get another one, or when there are many.
    assert (hook.was_kept, hook.is_kept, hook.are_kept) == (True, False, False)


def test_a_torn_update_sends_training_back_to_the_newest_checkpoint(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_consistent, seen = UpdateCounters.is_consistent, []

    def torn_once(counters: UpdateCounters) -> bool:
        if not seen:
            # As if the second server had applied the update that the lost worker was in, and the first had not.
            counters.begun[1].assign_add(1)
            counters.applied[1].assign_add(1)
        seen.append(is_consistent(counters))
        return seen[-1]

    monkeypatch.setattr(UpdateCounters, "is_consistent", torn_once)

    function, to_kill = InGraphSyncCalls.function, list[int]()

    def kill_before_call(calls: InGraphSyncCalls, num_steps: int) -> Any:
        # The strategy has looked for lost workers, and finds this one in its call.
        if to_kill:
            os.kill(to_kill.pop(), signal.SIGKILL)
        return function(calls, num_steps)

    monkeypatch.setattr(InGraphSyncCalls, "function", kill_before_call)

    class KillOnce(Hook):
        def after_run(self, context: Any, values: Any) -> None:
            if values.global_step == 15 and not seen:
                pids = context.session.strategy.pids
                to_kill.append(next(pid for task, pid in pids.items() if str(task) == "worker:1"))

        def due_in(self, step: int) -> int | None:
            return 15 - step if step < 15 else None

        def end(self, session: Any) -> None:
            seen.append(is_consistent(session.strategy._store.counters))

    x, y = toy_data()
    trainer = kdist.Trainer(
        models.mlp,
        cluster="2ps2w",
        strategy="sync_replicas",
        # So that both servers take part.
        placement="greedy",
        run_dir=run_dir,
        hooks=[CheckpointSaver(every_steps=10), KillOnce()],
    )
    with pytest.warns(UserWarning, match=r"in the middle of an update; resuming from .*ckpt-10 \(1 of 3\)"):
        trainer.fit(x, y, batch_size=8, steps=60, verbose=0)
    result = result_of(run_dir)
    assert (result["global_step"], result["restarts"]["cluster"]) == (60, 0)
    assert seen == [False, True]


@pytest.mark.long
def test_a_strict_quorum_that_lost_a_worker_ends_the_run(run_dir: Path) -> None:
    class KillOne(Hook):
        has_killed = False

        def after_run(self, context: Any, values: Any) -> None:
            if not self.has_killed:
                os.kill(list(context.session.strategy.pids.values())[-1], signal.SIGKILL)
            self.has_killed = True

    x, y = toy_data()
    trainer = kdist.Trainer(
        models.mlp,
        cluster="1ps2w",
        strategy="sync_replicas",
        run_dir=run_dir,
        hooks=[KillOne()],
        on_lost_worker="fail",
        worker_timeout=1,
        max_worker_restarts=0,
        max_restarts=0,
    )
    with (
        pytest.warns(UserWarning, match="worker:1 died"),
        pytest.raises(kdist.ClusterError, match=r"worker:1 did not come back within 1 s \(strategy.worker_timeout\)"),
    ):
        trainer.fit(x, y, batch_size=8, steps=100_000, verbose=0)


@pytest.mark.long
def test_a_call_that_was_cancelled_is_made_worker_by_worker(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = in_graph.InGraphSyncCalls.function
    cancelled: list[int] = []

    def cancel_once(calls: Any, num_steps: int) -> Any:
        if cancelled:
            return function(calls, num_steps)
        cancelled.append(num_steps)

        class Cancelled:
            name = b"cancelled"

            def __call__(self, _iterators: Any) -> Any:
                raise tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled.")

        return Cancelled()

    monkeypatch.setattr(in_graph.InGraphSyncCalls, "function", cancel_once)
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir)
    trainer.fit(x, y, batch_size=8, steps=20, verbose=0)
    assert (trainer.result.global_step, len(cancelled)) == (20, 1)


@pytest.mark.long
def test_an_error_of_the_users_names_the_worker(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir)
    with pytest.raises(kdist.TaskError, match=r"^worker:\d: .*label value"):
        trainer.fit(x, y + 7, batch_size=8, steps=20, verbose=0)


def test_batch_normalization_gets_the_mean_of_what_the_workers_saw(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.batch_normalized, cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir)
    trainer.fit(x + 5.0, y, batch_size=32, steps=200, verbose=0)
    normalization = trainer.model.layers[1]
    expected = trainer.model.layers[0](x + 5.0).numpy().mean(0)
    assert np.abs(normalization.moving_mean.numpy() - expected).max() < 0.5 * np.abs(expected).max() + 0.5


def test_a_resumed_run_comes_to_what_it_would_have_come_to(run_dir: Path) -> None:
    def fit_to(steps: int) -> dict[str, np.ndarray]:
        hooks = [CheckpointSaver(every_steps=7)]
        trainer = kdist.Trainer(dropping_out, cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir, hooks=hooks)
        trainer.fit(x, y, batch_size=8, steps=steps, verbose=0)
        reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / f"ckpt-{steps}"))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}

    def dropping_out() -> keras.Model:
        layers = keras.layers
        model = keras.Sequential([layers.Input((6,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = toy_data(60)
    whole = fit_to(17)
    for path in (run_dir / "checkpoints").glob("ckpt-17.*"):
        path.unlink()
    resumed = fit_to(17)
    assert result_of(run_dir)["gradients"]["applied"] == 3
    assert resumed.pop("data_fingerprint") == whole.pop("data_fingerprint")
    for name, value in whole.items():
        np.testing.assert_allclose(resumed[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
