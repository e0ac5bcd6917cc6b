"""Clusters whose tasks are started one by one, each by a command of its own, as on several machines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from commands import Command
from helpers import environment, free_addresses, is_task, result_of, tags_of, tasks_running, wait_until

from kdist.version import __version__

pytestmark = pytest.mark.cluster

MINE = ["model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]", "run.dir=D"]
# Seconds for processes that come up on a machine that has other things to do.
PATIENCE = 90.0
# Seconds for processes that are up and have nothing to wait for.
SOON = 10.0


class Tasks:
    """The commands of one cluster by the tasks that they are, each in a folder of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._processes: dict[str, Command] = {}
        #: Servers of chiefs that were killed.
        self._servers: set[int] = set()

    def start(self, task: str, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        self.folder(task).mkdir()
        self._console(task).touch()
        environ = {**environment(), **(variables or {})}
        self._processes[task] = Command(
            *MINE, *arguments, cwd=self.folder(task), stdout=self._console(task), env=environ
        )

    def folder(self, task: str) -> Path:
        return self._path / task.replace(":", "-")

    def said(self, task: str) -> str:
        return self._console(task).read_text()

    def have_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes.values())

    def code_of(self, task: str, timeout: float = PATIENCE) -> int:
        """The exit code of a task, once there is one."""
        process = self._processes[task]
        wait_until(lambda: process.poll() is not None, timeout, f"{task} ends")
        return process.wait()

    def codes(self, timeout: float = PATIENCE) -> dict[str, int]:
        """The exit codes of all, once all have ended."""
        wait_until(self.have_ended, timeout, "all tasks end")
        return {task: process.wait() for task, process in self._processes.items()}

    def that_wrote(self) -> list[str]:
        """The tasks with anything in their folders."""
        return [task for task in self._processes if list(self.folder(task).iterdir())]

    def signal(self, task: str, number: int) -> None:
        self._processes[task].send_signal(number)

    def kill(self, task: str) -> None:
        self._servers |= set(tasks_running(under=self._processes[task].pid))
        self._processes[task].kill()
        self._processes[task].wait()

    def servers_left(self) -> set[int]:
        return set(filter(is_task, self._servers))

    def end(self) -> None:
        """Kills what is left, by its own process id."""
        for task, process in self._processes.items():
            if process.poll() is None:
                self.kill(task)
        for pid in self.servers_left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _console(self, task: str) -> Path:
        return self._path / f"{task.replace(':', '-')}.txt"


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    tasks = Tasks(tmp_path)
    yield tasks
    tasks.end()
    assert tasks.have_ended()
    wait_until(lambda: not tasks.servers_left(), SOON, "no server is left")


def hosts(task: str, ps: Sequence[str], worker: Sequence[str], chief: str | None = None) -> list[str]:
    """The keys that make a command the task `ps:0`, or whichever, of a cluster."""
    job, _, index = task.partition(":")
    keys = ["cluster=hosts", f"cluster.ps=[{','.join(ps)}]", f"cluster.worker=[{','.join(worker)}]"]
    keys += [f"cluster.chief={chief}"] if chief else []
    return [*keys, f"cluster.job={job}", *([f"cluster.task={index}"] if index else [])]


def tf_config(task: str, cluster: Mapping[str, Sequence[str]]) -> dict[str, str]:
    job, _, index = task.partition(":")
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": int(index or 0)}})}


def test_four_commands_in_any_order_are_one_cluster_whose_chief_is_worker_0(tasks: Tasks) -> None:
    *ps, worker_0, worker_1 = free_addresses(4)
    for task in ("worker:1", "ps:0", "worker:0", "ps:1"):
        tasks.start(task, *hosts(task, ps, [worker_0, worker_1]), "train.steps=20")
        if task in ("ps:0", "worker:0"):
            time.sleep(1)
    assert tasks.codes() == {"worker:1": 0, "ps:0": 0, "worker:0": 0, "ps:1": 0}
    assert tasks.that_wrote() == ["worker:0"]
    result = result_of(tasks.folder("worker:0") / "D")
    assert (result["status"], result["global_step"], result["error"]) == ("done", 20, None)
    assert (result["cluster"], result["strategy"], result["workers"]) == ("2ps2w", "parameter_server", 2)
    assert "done  | step     20/20 | " in tasks.said("worker:0")
    assert [line for line in tasks.said("worker:0").splitlines() if line.startswith("task  | ")] == [
        f"task  | ps:0     | {ps[0]}",
        f"task  | ps:1     | {ps[1]}",
        f"task  | worker:0 | {worker_0} | also the chief",
        f"task  | worker:1 | {worker_1}",
    ]
    for task, address in (("ps:0", ps[0]), ("ps:1", ps[1]), ("worker:1", worker_1)):
        first, last = tasks.said(task).splitlines()
        assert first.endswith(f"{task} of 2ps2w | at {address}, chief worker:0 at {worker_0}")
        assert last == f"done  | {task} | the chief has finished"


@pytest.mark.long
def test_a_chief_of_its_own_trains_on_all_workers(tasks: Tasks) -> None:
    ps, worker_0, chief = free_addresses(3)
    for task in ("worker:0", "chief", "ps:0"):
        keys = hosts(task, [ps], [worker_0], chief)
        tasks.start(task, *keys, "strategy=sync_replicas", "train.steps=20")
    assert set(tasks.codes().values()) == {0}
    assert tasks.that_wrote() == ["chief"]
    result = result_of(tasks.folder("chief") / "D")
    assert (result["status"], result["global_step"], result["strategy"]) == ("done", 20, "sync_replicas")
    # With a chief of its own, worker 0 is a worker only.
    assert result["gradients"]["by_worker"]["worker:0"]["accepted"] == 20
    assert f"at {worker_0}, chief chief at {chief}" in tasks.said("worker:0")


@pytest.mark.long
def test_tf_config_says_who_is_who(tasks: Tasks) -> None:
    chief, ps, worker = free_addresses(3)
    # As Estimator wrote it: nothing listens at the evaluator's address.
    cluster = {"chief": [chief], "ps": [ps], "worker": [worker], "evaluator": ["127.0.0.1:9"]}
    run_dir = tasks.folder("chief:0") / "D"
    for task in ("ps:0", "evaluator:0", "chief:0", "worker:0"):
        keys = ["cluster=tf_config", "train.steps=20", f"run.dir={run_dir}"]
        tasks.start(task, *keys, variables=tf_config(task, cluster))
    assert tasks.codes() == {"ps:0": 0, "evaluator:0": 0, "chief:0": 0, "worker:0": 0}
    assert tasks.that_wrote() == ["chief:0"]
    result = result_of(run_dir)
    assert (result["status"], result["global_step"], result["cluster"]) == ("done", 20, "1ps1w")
    first, *evaluations, last = tasks.said("evaluator:0").splitlines()
    assert first.endswith(f"evaluator:0 of 1ps1w | evaluates {run_dir}/checkpoints")
    assert last == "done  | evaluator:0 | the chief has finished"
    # Whatever was saved before, the last checkpoint is evaluated, to what the chief found as well.
    loss = result["metrics"]["validation"]["loss"]
    assert f"eval  | step     20 | loss {loss:.4f}" in evaluations[-1]
    assert {"loss", "epoch_loss"} <= tags_of(run_dir / "tb" / "evaluator")


def test_workers_of_tf_config_train_together_and_worker_0_alone_writes(tasks: Tasks) -> None:
    workers = free_addresses(2)
    for task in ("worker:1", "worker:0"):
        # The shape says that this TF_CONFIG is of its tasks.
        tasks.start(task, "cluster=2w", "train.steps=20", variables=tf_config(task, {"worker": workers}))
    assert tasks.codes() == {"worker:1": 0, "worker:0": 0}
    result = result_of(tasks.folder("worker:0") / "D")
    assert (result["status"], result["global_step"]) == ("done", 20)
    assert (result["cluster"], result["strategy"], result["workers"]) == ("2w", "multi_worker_mirrored", 2)
    assert result["examples"] == 20 * 2 * 32
    assert f"task  | worker:1 | {workers[1]}\n" in tasks.said("worker:0")
    assert "kdist: error" not in tasks.said("worker:1")
    assert tasks.that_wrote() == ["worker:0"]


def test_a_server_that_never_comes_is_named_and_nobody_waits_on(tasks: Tasks) -> None:
    ps_0, missing, worker_0, worker_1 = free_addresses(4)
    for task in ("ps:0", "worker:1"):
        tasks.start(task, *hosts(task, [ps_0, missing], [worker_0, worker_1]), "cluster.start_timeout=30")
    tasks.start("worker:0", *hosts("worker:0", [ps_0, missing], [worker_0, worker_1]), "cluster.start_timeout=4")
    wait_until(lambda: "run dir" in tasks.said("worker:0"), PATIENCE, "the chief has begun")
    assert tasks.code_of("worker:0", 4 + 2 * SOON) == 75
    _, _, message = tasks.said("worker:0").partition("kdist: error: ")
    assert f"ps:1 ({missing})" in message
    # On a busy machine another task may be late as well, and is named beside it.
    assert "did not respond within 4 s (cluster.start_timeout): " in message
    assert f"nothing listens at {missing}" in message
    assert "Traceback" not in message
    result = result_of(tasks.folder("worker:0") / "D")
    assert result["status"] == "failed"
    assert f"ps:1 ({missing})" in result["error"]
    codes = tasks.codes(30 + SOON)
    assert {codes["ps:0"], codes["worker:1"]} <= {0, 75}


@pytest.mark.long
def test_tasks_whose_chief_is_killed_end_by_themselves(tasks: Tasks) -> None:
    ps, worker_0, worker_1 = free_addresses(3)
    for task in ("ps:0", "worker:1", "worker:0"):
        tasks.start(task, *hosts(task, [ps], [worker_0, worker_1]), "train.steps=1000000")
    wait_until(lambda: "valid | step" in tasks.said("worker:0"), PATIENCE, "the cluster trains")
    tasks.kill("worker:0")
    wait_until(lambda: not tasks.servers_left(), SOON, "the chief's server has ended with it")
    assert tasks.codes(SOON) == {"ps:0": 75, "worker:1": 75, "worker:0": -signal.SIGKILL}
    for task in ("ps:0", "worker:1"):
        assert (
            f"kdist: error: {task}: the chief (worker:0 at {worker_0}) exited without reporting completion"
            in tasks.said(task)
        )
    assert tasks.that_wrote() == ["worker:0"]


def test_a_task_whose_address_is_in_use_says_so(tasks: Tasks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ps, worker_0 = (f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second))
        for task in ("ps:0", "worker:0"):
            tasks.start(task, *hosts(task, [ps], [worker_0]), "train.steps=20")
        assert tasks.codes() == {"ps:0": 75, "worker:0": 75}
    for task, address in (("ps:0", ps), ("worker:0", worker_0)):
        assert f"kdist: error: {task} cannot serve at {address}: the address is in use" in tasks.said(task)
        assert tasks.said(task).count("kdist: error") == 1
    assert tasks.that_wrote() == ["worker:0"]


OTHER_VERSION = "import kdist.version\nkdist.version.__version__ = '0.0.9'\n"


@pytest.mark.long
def test_tasks_with_another_config_or_version_are_named_by_the_chief_and_by_themselves(
    tasks: Tasks, tmp_path: Path
) -> None:
    ps_0, worker_0, worker_1 = free_addresses(3)
    # Python runs it when it starts.
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    worker = subprocess.Popen(
        [sys.executable, "-m", "kdist", *MINE, *hosts("worker:1", [ps_0], [worker_0, worker_1])],
        env={**environment(), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert worker.stdout is not None
        # It has started.
        worker.stdout.readline()
        for task, arguments in {"ps:0": ["train.batch_size=64"], "worker:0": []}.items():
            keys = hosts(task, [ps_0], [worker_0, worker_1])
            tasks.start(task, *keys, *arguments, "cluster.start_timeout=60")
        assert tasks.codes() == {"ps:0": 2, "worker:0": 2}, tasks.said("worker:0")
        said_by_worker = worker.communicate(timeout=SOON)[0]
    finally:
        worker.kill()
        worker.wait(SOON)
    assert worker.returncode == 2
    of_server = "  ps:0: train.batch_size=64, chief 32"
    of_worker = f"  worker:1: kdist 0.0.9, chief {__version__}"
    first = "differs from the chief; all tasks need the same versions and config"
    assert tasks.said("ps:0").endswith(f"kdist: error: ps:0: {first}\n{of_server}\n")
    assert said_by_worker == f"kdist: error: worker:1: {first}\n{of_worker}\n"
    said = tasks.said("worker:0")
    assert f": {first.replace('differs', 'differ')}\n" in said
    assert of_server in said
    assert of_worker in said
    assert "acknowledge" not in said


@pytest.mark.long
def test_all_reduce_workers_with_another_config_are_named_by_all(tasks: Tasks) -> None:
    workers = free_addresses(2)
    for index, rate in enumerate(("0.1", "0.01")):
        keys = ["cluster=hosts", f"cluster.worker=[{','.join(workers)}]", "cluster.job=worker", f"cluster.task={index}"]
        tasks.start(f"worker:{index}", *keys, f"optimizer.learning_rate={rate}", "cluster.start_timeout=60")
    assert tasks.codes() == {"worker:0": 2, "worker:1": 2}, tasks.said("worker:0")
    for task in ("worker:0", "worker:1"):
        assert "worker:1: differs from the chief; all tasks need the same versions and config" in tasks.said(task)
        assert "  worker:1: optimizer.learning_rate=0.01, chief 0.1\n" in tasks.said(task)


def test_all_reduce_workers_are_lost_return_join_and_leave_in_one_run(tasks: Tasks) -> None:
    workers = free_addresses(3)
    common = ["train.steps=1000000", "train.steps_per_call=4", "hooks.checkpoint.every_steps=40", "cluster.patience=3"]
    chief = tasks.folder("worker:0") / "D"
    for task in ("worker:1", "worker:2", "worker:0"):
        tasks.start(task, *hosts(task, [], workers), *common)

    def wait_for_changes(*changes: str) -> None:
        """Waits until these changes of the cluster were made, and no other one."""

        def made() -> list[str]:
            return re.findall(r"^resize .*\| (\dw -> \dw) \|", tasks.said("worker:0"), re.MULTILINE)

        wait_until(lambda: len(made()) >= len(changes), PATIENCE, lambda: tasks.said("worker:0"))
        assert made() == list(changes)

    wait_until(lambda: "save  | step     80" in tasks.said("worker:0"), PATIENCE, lambda: tasks.said("worker:0"))
    tasks.kill("worker:1")
    wait_for_changes("3w -> 2w")
    said = tasks.said("worker:0")
    assert f"kdist: worker:1 is lost (nothing listens at {workers[1]}); resuming from checkpoints/ckpt-" in said
    # Whoever starts the tasks starts it again; another one is added, which knows the chief alone.
    tasks.start("worker:1 again", *hosts("worker:1", [], workers), *common)
    wait_for_changes("3w -> 2w", "2w -> 3w")
    tasks.start("joined", "cluster=hosts", "cluster.job=worker", f"cluster.chief={workers[0]}", *common)
    wait_for_changes("3w -> 2w", "2w -> 3w", "3w -> 4w")
    tasks.signal("worker:2", signal.SIGTERM)
    assert tasks.code_of("worker:2") == 0
    wait_for_changes("3w -> 2w", "2w -> 3w", "3w -> 4w", "4w -> 3w")
    resize = subprocess.run(
        [sys.executable, "-m", "kdist", "resize", str(chief), "workers=1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (resize.returncode, resize.stderr) == (0, "")
    assert (tasks.code_of("worker:1 again"), tasks.code_of("joined")) == (0, 0)
    tasks.signal("worker:0", signal.SIGTERM)
    assert tasks.codes() == {
        "worker:0": 143,
        "worker:1": -signal.SIGKILL,
        "worker:2": 0,
        "worker:1 again": 0,
        "joined": 0,
    }
    result = result_of(chief)
    assert (result["status"], result["cluster"], result["restarts"]) == ("preempted", "1w", {"worker": 0, "cluster": 1})
    assert [each["to"] for each in result["resizes"]] == ["2w", "3w", "4w", "3w", "1w"]
    assert all("Traceback" not in tasks.said(task) for task in tasks.codes())
