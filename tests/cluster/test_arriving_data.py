"""Data that keeps arriving, on real servers: over all workers every record counts once, whoever is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import counted
import numpy as np
import pytest

import kdist
from kdist.cluster.spec import Task
from kdist.hooks import CheckpointSaver, Hook

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "incoming").mkdir()
    return tmp_path / "incoming"


def arriving(folder: Path, parse: Any = counted.parse) -> Any:
    return kdist.arriving_files(folder, "*.parquet", parse, columns=counted.COLUMNS, poll_secs=0.1)


class AtStep(Hook):
    """Calls a function of the session once, when a step is reached."""

    def __init__(self, step: int, function: Any) -> None:
        self._step, self._function = step, function
        self._is_done = False

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step >= self._step and not self._is_done:
            self._is_done = True
            self._function(context.session)

    def due_in(self, step: int) -> int | None:
        return None if self._is_done else max(1, self._step - step)


class WhenWaiting(Hook):
    """Calls the next of some functions each time that all data is read."""

    def __init__(self, *functions: Any) -> None:
        self._functions = list(functions)

    def while_waiting(self, session: Any) -> None:
        if self._functions:
            self._functions.pop(0)()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("sync_replicas", marks=pytest.mark.long)])
def test_files_that_come_later_are_read_once_by_one_of_the_workers(folder: Path, run_dir: Path, strategy: str) -> None:
    def write(first: int) -> None:
        for number in range(first, first + 3):
            counted.write_file(folder / f"{number}.parquet", range(50 * number, 50 * number + 45))

    hook = WhenWaiting(lambda: write(0), lambda: write(3), (folder / "_END").touch)
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", strategy, run_dir=run_dir, hooks=[hook])
    # The workers validate at the end, when there is nothing for them to read.
    x = np.eye(counted.NUM_RECORDS, dtype=np.float32)[:64]
    trainer.fit(arriving(folder), batch_size=10, verbose=0, validation_data=(x, x[:, 0]))
    expected_loss = trainer.evaluate(x, x[:, 0], batch_size=10, return_dict=True)["loss"]
    assert trainer.result.metrics["validation"]["loss"] == pytest.approx(expected_loss)
    expected = np.zeros(counted.NUM_RECORDS)
    for number in range(6):
        expected[50 * number : 50 * number + 45] = 1
    np.testing.assert_array_equal(counted.counts(trainer.model), expected)
    assert trainer.result.examples == 6 * 45
    assert trainer.result.stopped_by == str(folder / "_END")
    by_worker = trainer.result.gradients.by_worker
    assert set(by_worker) == {"worker:0", "worker:1"}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("sync_replicas", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*worker.[01] ")
def test_a_file_that_kills_its_readers_is_set_aside(folder: Path, run_dir: Path, strategy: str) -> None:
    for number in range(3):
        counted.write_file(folder / f"{number}.parquet", range(100 * number, 100 * number + 100))
    (folder / "_END").touch()
    trainer = kdist.Trainer(counted.counting_model, "1ps2w", strategy, run_dir=run_dir, max_worker_restarts=2)
    with pytest.warns(UserWarning, match=r"1.parquet: .*is skipped: 2 workers in a row were lost while they read it"):
        trainer.fit(arriving(folder, counted.with_deadly(175)), batch_size=10, verbose=0)
    counts = counted.counts(trainer.model)
    assert counts[[*range(100), *range(200, 300)]].tolist() == [1.0] * 200
    assert counts[170:200].max() == 0
    assert trainer.result.stopped_by == str(folder / "_END")


def test_the_file_of_a_worker_that_is_lost_for_good_goes_to_one_with_nothing_to_read(
    folder: Path, run_dir: Path
) -> None:
    counted.write_file(folder / "0.parquet", range(100))
    (folder / "_END").touch()

    def kill_the_reader(session: Any) -> None:
        (reader,) = [worker for worker in range(2) if session.spec.data.splits.split_of(worker)]
        os.kill(session.strategy.pids[Task("worker", reader)], signal.SIGKILL)

    hooks = [AtStep(3, kill_the_reader)]
    trainer = kdist.Trainer(
        counted.counting_model, "1ps2w", run_dir=run_dir, hooks=hooks, max_worker_restarts=0, step_timeout=60.0
    )
    with pytest.warns(UserWarning, match="training continues without it"):
        trainer.fit(arriving(folder), batch_size=10, verbose=0)
    assert counted.counts(trainer.model)[:100].min() == 1
    assert trainer.result.seconds < 60


@pytest.mark.long
@pytest.mark.parametrize("restarts", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_lost_worker_costs_at_most_a_batch_that_counts_twice(folder: Path, run_dir: Path, restarts: int) -> None:
    for number in range(8):
        counted.write_file(folder / f"{number}.parquet", range(100 * number, 100 * number + 100))
    (folder / "_END").touch()

    def kill(session: Any) -> None:
        os.kill(session.strategy.pids[Task("worker", 1)], signal.SIGKILL)

    hooks = [AtStep(20, kill)]
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", run_dir=run_dir, hooks=hooks, max_worker_restarts=restarts)
    with pytest.warns(UserWarning, match="worker:1"):
        trainer.fit(arriving(folder), batch_size=10, verbose=0)
    counts = counted.counts(trainer.model)[:800]
    assert counts.min() == 1
    assert np.count_nonzero(counts > 1) in (0, 10)
    assert counts.max() <= 2
    assert trainer.result.restarts["worker"] == restarts


@pytest.mark.long
def test_a_lost_server_costs_nothing_that_a_checkpoint_had(folder: Path, run_dir: Path) -> None:
    for number in range(8):
        counted.write_file(folder / f"{number}.parquet", range(100 * number, 100 * number + 100))
    (folder / "_END").touch()

    def kill(session: Any) -> None:
        os.kill(session.strategy.pids[Task("ps", 1)], signal.SIGKILL)

    hooks = [AtStep(47, kill), CheckpointSaver(every_steps=10)]
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", run_dir=run_dir, hooks=hooks, max_restarts=1)
    with pytest.warns(UserWarning, match="restarting the cluster from"):
        trainer.fit(arriving(folder), batch_size=10, verbose=0)
    assert trainer.result.restarts["cluster"] == 1
    # What was trained on after the checkpoint went with the parameters, and came again.
    np.testing.assert_array_equal(counted.counts(trainer.model)[:800], np.ones(800))
    assert trainer.result.global_step == 80


@pytest.mark.long
def test_messages_of_a_topic_are_read_once_by_one_of_the_workers(run_dir: Path) -> None:
    broker = counted.Broker()
    broker.send("clicks", range(300))
    source = kdist.kafka_topic(
        broker.servers, "clicks", counted.parse_message, split_messages=40, idle_secs=2, poll_secs=0.1
    )
    hook = WhenWaiting(lambda: broker.send("clicks", range(300, 500)))
    trainer = kdist.Trainer(counted.counting_model, "2ps2w", run_dir=run_dir, hooks=[hook])
    trainer.fit(source, batch_size=10, verbose=0)
    np.testing.assert_array_equal(counted.counts(trainer.model), [1] * 500 + [0] * 500)
    assert trainer.result.examples == 500
    assert str(trainer.result.stopped_by).endswith("where nothing arrived for 2 s")
