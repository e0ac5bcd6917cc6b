"""Clusters whose tasks are started one by one: some are late, some never come, some come back by somebody's hand."""

from __future__ import annotations

import signal
import time

import pytest
from drilling import MINE, Drill, DrillRun
from helpers import free_ports, wait_until

from kdist.cluster.network.port_probe import accepts_connections

pytestmark = pytest.mark.cluster


class HandMade:
    """One parameter server and some workers, each by a command of its own; worker 0 is the chief."""

    def __init__(self, drill: Drill, num_workers: int, *arguments: str) -> None:
        ps, *workers = (f"127.0.0.1:{port}" for port in free_ports(1 + num_workers))
        self.addresses = {"ps:0": ps, **{f"worker:{i}": address for i, address in enumerate(workers)}}
        self._drill = drill
        self._arguments = [
            *MINE, "cluster=hosts", f"cluster.ps=[{ps}]", f"cluster.worker=[{','.join(workers)}]", *arguments,
        ]  # fmt: skip

    def start(self, task: str) -> DrillRun:
        job, index = task.split(":")
        self._drill.cwd.joinpath(task).mkdir(exist_ok=True)
        return self._drill.start(*self._arguments, f"cluster.job={job}", f"cluster.task={index}", folder=task)

    def wait_until_serving(self, task: str) -> None:
        wait_until(lambda: accepts_connections(self.addresses[task]), 60, f"{task} serves")


@pytest.mark.long
def test_a_worker_that_is_20_seconds_late_is_waited_for(drill: Drill) -> None:
    cluster = HandMade(drill, 2, "train.steps=300")
    chief, server = cluster.start("worker:0"), cluster.start("ps:0")
    time.sleep(20)
    late = cluster.start("worker:1")
    ended = chief.end(90)
    assert (ended.code, ended.step) == (0, 300)
    assert (server.end(30).code, late.end(30).code) == (0, 0)
    drill.report(4, "a worker starts 20 s late", "waited for", ended)


@pytest.mark.long
def test_a_worker_that_never_starts_is_named(drill: Drill) -> None:
    cluster = HandMade(drill, 2, "train.steps=300", "cluster.start_timeout=15")
    server, chief = cluster.start("ps:0"), cluster.start("worker:0")
    ended = chief.end(60)
    assert ended.code == 75
    missing = f"worker:1 ({cluster.addresses['worker:1']}) did not respond within 15 s (cluster.start_timeout)"
    assert missing in ended.console
    server.end(30)
    drill.report(4, "a worker never starts", "named after cluster.start_timeout", ended)


@pytest.mark.long
def test_a_worker_that_is_started_again_by_hand_is_taken_back(drill: Drill) -> None:
    cluster = HandMade(drill, 2, "train.steps=1000000", "train.steps_per_call=16")
    server, chief, worker = (cluster.start(task) for task in ("ps:0", "worker:0", "worker:1"))
    chief.wait_for(r"train \| step +300", 90)
    worker.process.kill()
    chief.wait_for(r"worker:1 is lost \(nothing listens at .*\); training continues without it")
    time.sleep(5)
    again = cluster.start("worker:1")
    chief.wait_for(r"worker:1 is back after")
    chief.process.terminate()
    ended = chief.end()
    assert ended.code == 143
    assert ended.result["restarts"] == {"worker": 1, "cluster": 0}
    assert ended.result["extra_steps"] <= 16
    assert (server.end(30).code, again.end(30).code) == (0, 0)
    drill.report(2, "kill -9 of a worker on another machine, started by hand after 5 s", "readmitted", ended)


@pytest.mark.long
def test_a_server_that_is_killed_and_started_at_once_on_its_port_is_not_taken_for_the_old_one(drill: Drill) -> None:
    cluster = HandMade(drill, 1, "train.steps=1000000", "hooks.checkpoint.every_steps=200")
    server, chief = cluster.start("ps:0"), cluster.start("worker:0")
    chief.wait_for(r"save  \| step +400", 90)
    server.process.kill()
    server.process.wait()
    again = cluster.start("ps:0")
    ended = chief.end(30)
    assert ended.code == 75
    assert "kdist: error: ps:0 is lost" in ended.console
    assert "resumes from checkpoints/ckpt-" in ended.console
    again.process.send_signal(signal.SIGTERM)
    again.end(30)
    drill.report(
        8,
        "a ps killed and restarted at once on its port",
        "its values are lost: exited, naming the checkpoint to resume",
        ended,
    )
