"""An evaluator that is started as a command of its own, and shares a bucket with its chief, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from commands import Command
from helpers import environment, free_addresses, objects_in, tags_of, tasks_running, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("bucket")]

MINE = ["model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]"]


class Tasks:
    """The commands of a cluster, each on a machine of its own as far as its files are concerned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ps, self._worker = free_addresses(2)
        self._commands: dict[str, Command] = {}

    def start(self, task: str, *arguments: str) -> None:
        job, _, index = task.partition(":")
        cluster = ["cluster=hosts", f"cluster.ps=[{self._ps}]", f"cluster.worker=[{self._worker}]"]
        folder = self.folder(task)
        folder.mkdir()
        self._commands[task] = Command(
            *MINE, *cluster, f"cluster.job={job}", f"cluster.task={index}", "run.dir=s3://bucket/run", *arguments,
            cwd=folder, stdout=folder / "console", env={**environment(), "XDG_CACHE_HOME": str(folder / "cache")},
        )  # fmt: skip

    def folder(self, task: str) -> Path:
        return self._path / task.replace(":", "-")

    def said(self, task: str) -> str:
        console = self.folder(task) / "console"
        return console.read_text() if console.exists() else ""

    def code_of(self, task: str, timeout: float = 90) -> int:
        return self._commands[task].wait(timeout)

    def kill(self, task: str) -> None:
        self._commands[task].kill()

    def end(self) -> None:
        for started in self._commands.values():
            started.kill()
            started.wait(10)


@pytest.fixture
def tasks(tmp_path: Path) -> Any:
    tasks = Tasks(tmp_path)
    yield tasks
    tasks.end()
    wait_until(lambda: not tasks_running(under=os.getpid()), 10, "no server is left")


@pytest.mark.long
def test_it_evaluates_what_the_chief_uploads_and_its_results_are_in_the_bucket(
    tasks: Tasks, bucket: Any, tmp_path: Path
) -> None:
    for task in ("evaluator:0", "ps:0", "worker:0"):
        tasks.start(task, "train.steps=20")
    assert {task: tasks.code_of(task) for task in ("worker:0", "ps:0", "evaluator:0")} == {
        "worker:0": 0, "ps:0": 0, "evaluator:0": 0,
    }, tasks.said("evaluator:0")  # fmt: skip
    found = objects_in(bucket, "run/")
    first, *evaluations, last = tasks.said("evaluator:0").splitlines()
    assert first.endswith("evaluator:0 of 1ps1w | evaluates s3://bucket/run/checkpoints")
    assert last == "done  | evaluator:0 | the chief has finished"
    # Whatever was saved before, the last checkpoint is evaluated, to what the chief found as well.
    loss = json.loads(found["result.json"])["metrics"]["validation"]["loss"]
    assert f"eval  | step     20 | loss {loss:.4f}" in evaluations[-1]
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents").write_bytes(found["tb/evaluator/events.out.tfevents"])
    assert {"loss", "epoch_loss"} <= tags_of(tmp_path / "tb")
    # Nothing of it stays on its machine, and the bucket holds nothing but the run.
    assert {path.name for path in tasks.folder("evaluator:0").rglob("*")} == {"console", "cache", "kdist"}
    assert not [name for name in found if name.startswith(".lock")]


@pytest.mark.long
def test_it_ends_by_itself_when_its_chief_is_killed(tasks: Tasks) -> None:
    for task in ("evaluator:0", "ps:0", "worker:0"):
        tasks.start(task, "train.steps=1000000", "hooks.checkpoint.every_secs=2")
    wait_until(lambda: "eval  | step" in tasks.said("evaluator:0"), 90, lambda: tasks.said("evaluator:0"))
    tasks.kill("worker:0")
    # On this machine, it is known at once.
    assert tasks.code_of("evaluator:0", 30) == 75
    assert "(worker:0 at " in tasks.said("evaluator:0")
    assert "exited without reporting completion" in tasks.said("evaluator:0")


def test_it_does_not_wait_for_ever_for_a_chief(tasks: Tasks) -> None:
    tasks.start("evaluator:0", "cluster.start_timeout=1")
    assert tasks.code_of("evaluator:0") == 75
    message = "kdist: error: evaluator:0: no chief trains in s3://bucket/run for "
    assert message in tasks.said("evaluator:0")
    assert tasks.said("evaluator:0").count("\n") == 2


def test_a_bucket_that_is_missing_is_a_wrong_run_dir(tasks: Tasks) -> None:
    tasks.start("evaluator:0", "run.dir=s3://no-such-bucket/run", "run.storage_timeout=1")
    assert tasks.code_of("evaluator:0") == 2
    assert tasks.said("evaluator:0").startswith(
        "kdist: error: run.dir=s3://no-such-bucket/run: there is no such bucket"
    )
