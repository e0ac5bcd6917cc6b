"""All-reduce workers as processes of this machine."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import environment, free_addresses, free_ports, process_name, result_of, tags_of, tasks_running, toy_data

import kdist
from kdist.hooks import CheckpointSaver, Hook, MetricsServer, Session
from kdist.run.checkpoint import Checkpoints
from kdist.run.metrics_file import read_rows

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


class Scrapes(Hook):
    """Reads what `MetricsServer` says of a run at its end."""

    def __init__(self, port: int) -> None:
        self.port = port

    def end(self, session: Session) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            self.text = answer.read().decode()


def test_only_the_chief_writes_and_its_results_come_back(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = toy_data()
    own = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
    scrapes = Scrapes(free_ports(1)[0])
    hooks = [CheckpointSaver(every_steps=16), MetricsServer(scrapes.port), scrapes]
    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=hooks)
    history = trainer.fit(x, y, batch_size=8, epochs=3, validation_data=tf.data.Dataset.from_tensors((x, y)))
    # Both workers' batches make one step: 256 examples are 16 steps of 2 x 8.
    result = result_of(run_dir)
    assert (result["status"], result["global_step"], result["workers"]) == ("done", 48, 2)
    assert result["examples"] == 48 * 16
    assert trainer.result.global_step == 48
    epochs = [row for row in read_rows(run_dir) if row["kind"] == "epoch"]
    assert [row["val_loss"] for row in epochs] == history.history["val_loss"]
    assert (result["config"]["train"]["epochs"], result["config"]["train"]["max_restarts"]) == (3, 3)
    assert history.epoch == [0, 1, 2]
    assert history.history["val_loss"][-1] == pytest.approx(trainer.evaluate(x, y, return_dict=True)["loss"], rel=1e-5)
    assert Checkpoints(run_dir / "checkpoints").steps() == [0, 16, 32, 48]
    assert "updates/staleness" not in tags_of(run_dir / "tb" / "train")
    out = capsys.readouterr().out
    assert "done  | step     48/48" in out
    # Where tasks are is said of those that others start.
    assert "task  | " not in out
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["chief-0.log", "worker-0.log", "worker-1.log"]
    # The session is in this process, and each worker in one of its own.
    sizes = dict(re.findall(r'kdist_resident_memory_bytes\{task="(.+?)"\} (\d+)', scrapes.text))
    assert sizes.keys() == {"chief", "worker:0", "worker:1"}
    assert min(map(int, sizes.values())) > 10**8
    # This process is as it was.
    assert own(np.zeros((1, 6), np.float32)).shape == (1, 2)
    # A second fit resumes from the model, another trainer from the checkpoint; on another number of workers, too.
    trainer.fit(x, y, batch_size=8, steps=50, verbose=0)
    assert result_of(run_dir)["gradients"]["applied"] == 2
    kdist.Trainer(models.mlp, run_dir=run_dir).fit(x, y, batch_size=8, steps=60, verbose=0)
    assert result_of(run_dir)["gradients"]["applied"] == 10


def signal_task(name: str, number: signal.Signals) -> None:
    """Sends a signal to a task of this process."""
    for pid in tasks_running(under=os.getpid()):
        if process_name(pid) == name:
            os.kill(pid, number)


class KillAWorker(Hook):
    """Kills the worker that is not the chief."""

    def after_run(self, context: Any, values: Any) -> None:
        signal_task("worker:1", signal.SIGKILL)


@pytest.mark.long
def test_a_worker_that_is_killed_is_named(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[KillAWorker()], max_restarts=0)
    with pytest.raises(kdist.ClusterError, match=r"worker:1 died \(signal 9, SIGKILL\)"):
        trainer.fit(x, y, batch_size=8, steps=100_000, verbose=0)
    result = result_of(run_dir)
    assert result["status"] == "failed"
    assert "worker" in result["error"]


class StopsOnce(Hook):
    """Stops the chief after its first steps: there is a checkpoint to go on from."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, session: Any) -> None:
        self.events.append("begin")

    def after_create_session(self, session: Any) -> None:
        self.events.append("created")

    def after_run(self, context: Any, values: Any) -> None:
        if self.events.count("created") == 1:
            signal_task("worker:0", signal.SIGSTOP)
            # Stopped while this process waits for it.
            context.session.read()

    def close(self) -> None:
        self.events.append("close")


@pytest.mark.long
def test_a_process_of_its_own_that_is_stopped_is_named_and_started_again(run_dir: Path) -> None:
    x, y = toy_data()
    hook = StopsOnce()
    # With other workers, these notice it as well.
    trainer = kdist.Trainer(
        models.mlp,
        strategy="mirrored",
        devices=2,
        run_dir=run_dir,
        hooks=[hook],
        step_timeout=3,
        max_restarts=1,
    )
    with pytest.warns(
        UserWarning, match=r"worker:0 has been stopped for 3 s \(cluster.step_timeout\); restarting the cluster"
    ):
        trainer.fit(x, y, batch_size=8, steps=20, verbose=0)
    assert trainer.result.global_step == 20
    assert trainer.result.restarts == {"worker": 0, "cluster": 1}
    assert hook.events == ["begin", "created", "created", "close"]


class Interrupts(Hook):
    """Interrupts the run, and goes on for a long time."""

    def __init__(self, times: int) -> None:
        self._times = times

    def after_run(self, context: Any, values: Any) -> None:
        for _ in range(self._times):
            os.kill(os.getpid(), signal.SIGINT)
            # Signals that follow each other at once are one.
            time.sleep(0.7)
        time.sleep(60)


@pytest.mark.parametrize("times", [2, pytest.param(1, marks=pytest.mark.long)], ids=["again", "grace over"])
@pytest.mark.filterwarnings("ignore:kdist. not ended")
def test_an_interrupt_ends_a_run_while_a_hook_runs(run_dir: Path, times: int) -> None:
    x, y = toy_data()
    options: Any = {"strategy": "mirrored", "devices": 2, "grace_secs": 2.0}
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[Interrupts(times)], **options)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(x, y, batch_size=8, steps=100_000, verbose=0)
    # Nor was it started again.
    assert time.monotonic() - began < 50


@pytest.mark.long
def test_an_error_of_the_users_data_comes_back(run_dir: Path) -> None:
    def dataset(context: kdist.DataContext) -> tf.data.Dataset:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir).fit(dataset, steps=5, verbose=0)


def test_an_error_of_the_users_comes_back_with_its_worker(run_dir: Path) -> None:
    class Raises(Hook):
        def after_run(self, context: Any, values: Any) -> None:
            raise KeyError("no such tag")

    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[Raises()])
    with pytest.raises(KeyError, match="no such tag"):
        trainer.fit(x, y, batch_size=8, steps=5, verbose=0)
    assert result_of(run_dir)["status"] == "failed"
    assert "no such tag" in result_of(run_dir)["error"]


@pytest.mark.long
def test_what_cannot_travel_is_refused(run_dir: Path) -> None:
    x, y = toy_data()

    lock = threading.Lock()

    def dataset(context: kdist.DataContext) -> tf.data.Dataset:
        with lock:
            return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)

    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match="cannot be sent to the processes"):
        trainer.fit(dataset, steps=5, verbose=0)

    class Asks(Hook):
        def end(self, session: Any) -> None:
            session.strategy.store()

    asks = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[Asks()])
    with pytest.raises(AttributeError, match="store"):
        asks.fit(x, y, steps=5, verbose=0)


class Halves(Hook):
    """Halves a bias at every fourth step, and notes what it has read."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step % 4:
            return
        (bias,) = context.session.read(["parameters/dense_1/bias"]).values()
        context.session.write({"parameters/dense_1/bias": bias / 2})
        (now,) = context.session.read(["parameters/dense_1/bias"]).values()
        assert np.array_equal(now, bias / 2)
        self.seen.append((values.global_step, float(np.abs(bias).sum())))

    def due_in(self, step: int) -> int:
        return 4 - step % 4


@pytest.mark.parametrize(
    ("cluster", "options"),
    [("2w", {}), pytest.param("local", {"strategy": "mirrored", "devices": 2}, marks=pytest.mark.long)],
)
def test_a_session_of_ones_own_has_hooks_that_read_and_write_also_after_a_worker_is_lost(
    run_dir: Path, cluster: str, options: dict[str, Any]
) -> None:
    x, y = toy_data()
    halves = Halves()
    hooks = [halves, CheckpointSaver(every_steps=8)]
    trainer = kdist.Trainer(models.mlp, cluster=cluster, run_dir=run_dir, hooks=hooks, seed=1, **options)
    history = keras.callbacks.History()
    fit = trainer.session(x, y, batch_size=8, epochs=3, shuffle=False, callbacks=[history], verbose=0)
    lost = pytest.warns(UserWarning, match=r"worker:\d died \(signal 9, SIGKILL\); restarting the cluster")
    with lost, fit as session:
        first = session.strategy.pids
        while not session.should_stop():
            session.run()
            if session.global_step == 20 and session.strategy.pids == first:
                os.kill(list(first.values())[-1], signal.SIGKILL)
        assert session.restarts == {"worker": 0, "cluster": 1}
    assert result_of(run_dir)["restarts"] == {"worker": 0, "cluster": 1}
    # Steps after the checkpoint of step 16 are repeated, with the same values.
    assert [step for step, _ in halves.seen] == [4, 8, 12, 16, 20, 20, *range(24, 49, 4)]
    assert halves.seen[4][1] == pytest.approx(halves.seen[5][1], rel=1e-5)
    assert (history.epoch, result_of(run_dir)["global_step"]) == ([0, 1, 2], 48)


@pytest.mark.long
def test_one_worker_alone_trains(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="1w", strategy="multi_worker_mirrored", run_dir=run_dir)
    trainer.fit(x, y, batch_size=8, steps=2, verbose=0)
    assert (trainer.result.global_step, trainer.result.examples) == (2, 16)


def test_mirrored_reads_a_generator_of_this_process(run_dir: Path) -> None:
    x, y = toy_data()
    lock = threading.Lock()

    def batches() -> Any:
        for i in range(8):
            with lock:
                yield x[i * 8 : (i + 1) * 8], y[i * 8 : (i + 1) * 8]

    trainer = kdist.Trainer(models.mlp, strategy="mirrored", devices=2, run_dir=run_dir)
    alone = models.mlp()
    alone.set_weights(trainer.model.get_weights())
    trainer.fit(batches(), verbose=0)
    # Two batches make a step.
    alone.fit(x[:64], y[:64], batch_size=16, shuffle=False, verbose=0)
    for mine, other in zip(trainer.model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_replicas_in_another_process_name_a_wrong_label_and_pass_over_a_damaged_checkpoint(run_dir: Path) -> None:
    x, y = toy_data()
    replicas: dict[str, Any] = {"strategy": "mirrored", "devices": 2}
    kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[CheckpointSaver(every_steps=4)], **replicas).fit(
        x, y, batch_size=8, steps=8, verbose=0
    )
    (newest,) = (run_dir / "checkpoints").glob("ckpt-8.data*")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 255
    newest.write_bytes(content)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, **replicas)
    with (
        pytest.warns(UserWarning, match="ckpt-8 is damaged"),
        pytest.raises(kdist.TaskError, match=r"worker:0: InvalidArgumentError.*label value of 100"),
    ):
        trainer.fit(x, np.full_like(y, 100), batch_size=8, steps=12, verbose=0)
    assert trainer.result.global_step == 4


JOINED = """
import os, sys
import tensorflow as tf
from kdist._compat.collectives import join_collectives
index, addresses = int(sys.argv[1]), dict(enumerate(sys.argv[2:]))
strategy = join_collectives(addresses, index)

def summed():
    own = tf.range(3.0) * (1 + index)
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.identity(own)))

function = tf.function(summed, autograph=False).get_concrete_function()
print(*{op.type for op in function.graph.get_operations() if op.type.startswith("Collective")}, function().numpy())
sys.stdout.flush()
os._exit(0)
"""


def test_joined_workers_exchange_small_tensors_in_one_round() -> None:
    addresses = free_addresses(2)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", JOINED, str(index), *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for index in range(2)
    ]
    try:
        said = [worker.communicate(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [out for out, _ in said] == ["CollectiveGatherV2 [0. 3. 6.]\n"] * 2, said[0][1][-2000:]
