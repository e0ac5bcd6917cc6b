"""The pods of `deploy/kubernetes/base`, played: a host is a pod, with its name, its address and its restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pods
import pytest
from clusters import MINE, Hosts
from helpers import descendants, environment, result_of, wait_until
from network import Host, Network

pytestmark = [pytest.mark.cluster, pytest.mark.long]

#: What the manifests say, but for the recipe and its run dir.
_REPLACED = ("+recipe=", "run.dir=")
_CHIEF, _WORKER, _SERVERS = "train-0", "train-1", ("train-2", "train-3")


@dataclass
class Running:
    """A pod that runs, on a host of its own."""

    pod: pods.Pod
    host: Host
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Cluster:
    """Acts as the Job controller and the kubelets do with the pods."""

    network: Network
    folder: Path
    arguments: tuple[str, ...]
    running: dict[str, Running] = field(default_factory=dict)
    #: Exit codes of pods that have ended, in order.
    ended: list[tuple[str, int]] = field(default_factory=list)
    _used: int = 0

    def start(self, *names: str) -> None:
        """Starts pods, all if none is named; their names are known from now on."""
        for pod in pods.pods_of(pods.base()):
            name = pod.name.partition(".")[0]
            if names and name not in names:
                continue
            host = self.network.hosts[self._used]
            self._used += 1
            self.network.rename(host, pod.name)
            log = self.folder / f"{name}.txt"
            given = [text for text in pod.arguments if not text.startswith(_REPLACED)]
            with log.open("ab") as output:
                process = subprocess.Popen(
                    host.inside(sys.executable, "-m", "kdist", *given, *MINE, "run.log_format=text", *self.arguments,
                                cwd=self.network.disk),
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env={**environment(), **pods.environment_of(pod)},
                )  # fmt: skip
            self.running[name] = Running(pod, host, process, log)

    def tend(self) -> None:
        """Starts pods in the place of those that have ended, as their Job says."""
        for name, running in list(self.running.items()):
            code = running.process.poll()
            if code is None:
                continue
            del self.running[name]
            self.ended.append((name, code))
            # Its name is forgotten, and the next pod has another address.
            self.network.rename(running.host, running.host.link)
            if running.pod.is_replaced(code if code >= 0 else 128 - code):
                self.start(name)

    def tend_until(self, condition: str | None, timeout: float = 150) -> None:
        """Tends until the chief has said what matches, or until all pods have ended."""

        def is_reached() -> bool:
            self.tend()
            return (
                not self.running if condition is None else bool(re.search(condition, self.said(_CHIEF), re.MULTILINE))
            )

        wait_until(is_reached, timeout, lambda: f"{condition} in:\n{self.all_said()}")

    def tend_until_step(self, step: int) -> None:
        def is_reached() -> bool:
            self.tend()
            steps = re.findall(r"^train \| step +(\d+)", self.said(_CHIEF), re.MULTILINE)
            return bool(steps) and int(steps[-1]) >= step

        wait_until(is_reached, 150, lambda: f"step {step} in:\n{self.all_said()}")

    def terminate(self, *names: str) -> None:
        """Deletes pods: SIGTERM to process 1 of each."""
        for name in names:
            self.running[name].process.send_signal(signal.SIGTERM)

    def kill(self, name: str) -> None:
        """Kills all processes of a pod, as the end of its machine does."""
        process = self.running[name].process
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def all_said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("train-*.txt")))

    def saved_steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"^save +\| step +(\d+)", self.said(_CHIEF), re.MULTILINE)]

    def resumed_at(self) -> int:
        (step,) = re.findall(r"^load +\| step +(\d+)", self.said(_CHIEF), re.MULTILINE)
        return int(step)


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    # Spare hosts are the addresses of pods that take another one's place.
    network = hosts.network(10)
    found = Cluster(network, tmp_path, ("train.steps=12000", "hooks.checkpoint.every_steps=1000"))
    yield found
    for name in list(found.running):
        found.kill(name)


def test_names_may_come_late_and_a_worker_may_move(cluster: Cluster) -> None:
    cluster.start(_CHIEF, *_SERVERS)
    time.sleep(8)
    cluster.start(_WORKER)
    cluster.tend_until_step(2000)
    cluster.kill(_WORKER)
    cluster.tend_until(r"worker:1 is back")
    cluster.tend_until(None)
    assert cluster.ended[0] == (_WORKER, -signal.SIGKILL)
    assert {code for _, code in cluster.ended[1:]} == {0}, cluster.all_said()
    assert result_of(cluster.network.disk / "D")["global_step"] == 12000


def test_a_chief_whose_node_is_drained_resumes_where_it_was(cluster: Cluster) -> None:
    cluster.start()
    cluster.tend_until_step(2500)
    others = {name: running.process.pid for name, running in cluster.running.items() if name != _CHIEF}
    cluster.terminate(_CHIEF)
    cluster.tend_until(r"^load")
    assert cluster.ended == [(_CHIEF, 143)], cluster.all_said()
    assert cluster.resumed_at() == max(step for step in cluster.saved_steps() if step <= cluster.resumed_at())
    assert cluster.resumed_at() >= 2500
    # They have stayed, and nothing of their processes but the number has.
    assert {name: cluster.running[name].process.pid for name in others} == others
    for name in others:
        assert "was told to stop; it waits for the next chief (cluster.wait_for_next_chief)" in cluster.said(name)
    cluster.tend_until(None)
    assert {code for _, code in cluster.ended[1:]} == {0}, cluster.all_said()
    assert result_of(cluster.network.disk / "D")["global_step"] == 12000


def test_pods_that_are_drained_leave_and_join_again_without_a_loss(cluster: Cluster) -> None:
    cluster.arguments = ("train.steps=12000", "hooks.checkpoint.every_steps=1000")
    cluster.start()
    cluster.tend_until_step(2000)
    for name, shape in ((_WORKER, "2ps1w"), (_SERVERS[1], "1ps2w")):
        cluster.terminate(name)
        cluster.tend_until(rf"^resize .* {shape} -> 2ps2w")
    cluster.tend_until(None)
    assert cluster.ended[:2] == [(_WORKER, 143), (_SERVERS[1], 143)], cluster.all_said()
    assert {code for _, code in cluster.ended[2:]} == {0}, cluster.all_said()
    result = result_of(cluster.network.disk / "D")
    assert [each["to"] for each in result["resizes"]] == ["2ps1w", "2ps2w", "1ps2w", "2ps2w"]
    assert (result["global_step"], result["restarts"]) == (12000, {"worker": 0, "cluster": 0})


def test_a_server_that_moves_costs_the_steps_since_the_last_save(cluster: Cluster) -> None:
    cluster.start()
    cluster.tend_until_step(3500)
    cluster.kill(_SERVERS[1])
    saved = max(cluster.saved_steps())
    cluster.tend_until(r"^load")
    assert cluster.resumed_at() >= saved, cluster.all_said()
    assert cluster.ended[:2] == [(_SERVERS[1], -signal.SIGKILL), (_CHIEF, 75)], cluster.ended
    cluster.tend_until(None)
    assert [code for _, code in cluster.ended[2:]] == [0] * 4, cluster.all_said()
    assert result_of(cluster.network.disk / "D")["global_step"] == 12000


def test_all_pods_that_are_told_to_stop_come_back_and_lose_nothing(cluster: Cluster) -> None:
    cluster.start()
    cluster.tend_until_step(2500)
    cluster.terminate(*cluster.running)
    cluster.tend_until(r"^load")
    assert sorted(cluster.ended) == sorted((name, 143) for name in (_CHIEF, _WORKER, *_SERVERS)), cluster.all_said()
    assert cluster.resumed_at() >= 2500
    cluster.tend_until(None)
    assert [code for _, code in cluster.ended[4:]] == [0] * 4, cluster.all_said()


def test_a_chief_that_is_killed_is_replaced(cluster: Cluster) -> None:
    cluster.start()
    cluster.tend_until_step(3500)
    saved = max(cluster.saved_steps())
    cluster.kill(_CHIEF)
    cluster.tend_until(r"^load")
    assert cluster.resumed_at() >= saved
    assert cluster.ended == [(_CHIEF, -signal.SIGKILL)]
    cluster.tend_until(None)
    assert [code for _, code in cluster.ended[1:]] == [0] * 4, cluster.all_said()


def test_a_run_that_would_fail_again_ends_all_pods(cluster: Cluster) -> None:
    cluster.arguments = (*cluster.arguments, "model._target_=user_code.not_a_model")
    cluster.start()
    with pytest.raises(RuntimeError, match=f"{_CHIEF}.* ended with 2, and the Job fails"):
        cluster.tend_until(None)
    assert "not_a_model" in cluster.said(_CHIEF)
    # Then the Job deletes the others, which wait for their chief.
    cluster.terminate(*cluster.running)
    codes = {name: running.process.wait(30) for name, running in cluster.running.items()}
    assert set(codes.values()) <= {0, 143}, cluster.all_said()
    assert codes.keys() == {_WORKER, *_SERVERS}
