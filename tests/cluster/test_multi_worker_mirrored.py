"""All-reduce workers as this machine's own processes, started by `fit`."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import process_name, result_of, tags_of, toy_data

import kdist
from kdist.hooks import CheckpointSaver, Hook
from kdist.run.checkpoint import Checkpoints
from kdist.run.metrics_file import read_rows

pytestmark = pytest.mark.cluster


def test_only_the_chief_writes_and_its_results_come_back(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = toy_data()
    own = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[CheckpointSaver(every_steps=16)])
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
    assert history.history["val_loss"][-1] == pytest.approx(trainer.evaluate(x, y)["loss"], rel=1e-5)
    assert Checkpoints(run_dir / "checkpoints").steps() == [0, 16, 32, 48]
    assert "async/staleness" not in tags_of(run_dir / "tb" / "train")
    assert "done  | step     48/48" in capsys.readouterr().out
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["worker-0.log", "worker-1.log"]
    # This process is as it was.
    assert own(np.zeros((1, 6), np.float32)).shape == (1, 2)
    # A second fit resumes from the model, another trainer from the checkpoint; on another number of workers, too.
    trainer.fit(x, y, batch_size=8, steps=50, verbose=0)
    assert result_of(run_dir)["gradients"]["applied"] == 2
    kdist.Trainer(models.mlp, run_dir=run_dir).fit(x, y, batch_size=8, steps=60, verbose=0)
    assert result_of(run_dir)["gradients"]["applied"] == 10


class KillAWorker(Hook):
    """Kills the other worker from within the chief, in whose process hooks run."""

    def after_run(self, context: Any, values: Any) -> None:
        parent = os.getppid()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    name = process_name(int(entry.name))
                except OSError:
                    continue
                if int(stat[1]) == parent and name == "worker:1":
                    os.kill(int(entry.name), signal.SIGKILL)


def test_a_worker_that_is_killed_is_named(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[KillAWorker()], max_restarts=0)
    with pytest.raises(kdist.ClusterError, match=r"worker:1 died \(signal 9, SIGKILL\)"):
        trainer.fit(x, y, batch_size=8, steps=100_000, verbose=0)
    result = result_of(run_dir)
    assert result["status"] == "failed"
    assert "worker" in result["error"]


class StopsOnce(Hook):
    """Stops the chief, in whose process hooks run, the first time that there are checkpoints to go on from."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def after_run(self, context: Any, values: Any) -> None:
        if not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_process_of_its_own_that_is_stopped_is_named_and_started_again(run_dir: Path, tmp_path: Path) -> None:
    x, y = toy_data()
    # With other workers, these notice it as well.
    trainer = kdist.Trainer(
        models.mlp,
        strategy="mirrored",
        devices=2,
        run_dir=run_dir,
        hooks=[StopsOnce(tmp_path / "mark")],
        step_timeout=3,
        max_restarts=1,
    )
    with pytest.warns(
        UserWarning, match=r"worker:0 has been stopped for 3 s \(cluster.step_timeout\); restarting the cluster"
    ):
        trainer.fit(x, y, batch_size=8, steps=20, verbose=0)
    assert trainer.result.global_step == 20
    assert trainer.result.restarts == {"worker": 0, "cluster": 1}


def test_an_error_of_the_users_comes_back_with_its_worker(run_dir: Path) -> None:
    def dataset(context: kdist.DataContext) -> tf.data.Dataset:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir).fit(dataset, steps=5, verbose=0)

    class Raises(Hook):
        def after_run(self, context: Any, values: Any) -> None:
            raise KeyError("no such tag")

    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[Raises()])
    with pytest.raises(kdist.TaskError, match="worker:0: KeyError: .*no such tag"):
        trainer.fit(x, y, batch_size=8, steps=5, verbose=0)
    assert result_of(run_dir)["status"] == "failed"


def test_what_cannot_travel_and_a_loop_of_ones_own_are_refused(run_dir: Path) -> None:
    x, y = toy_data()

    class Stuck(Hook):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    trainer = kdist.Trainer(models.mlp, cluster="2w", run_dir=run_dir, hooks=[Stuck()])
    with pytest.raises(kdist.ConfigError, match="cannot be sent to the processes"):
        trainer.fit(x, y, steps=5, verbose=0)
    with pytest.raises(kdist.ConfigError, match="use fit"), trainer.session(x, y, steps=5):
        pass
