"""Signals as schedulers send them: to every process of every task at once, and twice."""

from __future__ import annotations

import os
import signal
import time

import pytest
from clusters import HostCluster, Hosts, four, three
from helpers import catches, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def newest_checkpoint(cluster: HostCluster) -> int:
    return max(int(path.stem.split("-")[1]) for path in (cluster.run_dir / "checkpoints").glob("ckpt-*.index"))


@pytest.mark.parametrize("repetition", range(5))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_tasks_saves_the_step_that_was_reached(
    hosts: Hosts, number: signal.Signals, repetition: int
) -> None:
    network = hosts.network(4)
    sync = ["strategy=sync_replicas"] if repetition % 2 else []
    cluster = hosts.cluster(network, four(network), "train.steps=1000000", *sync)
    cluster.start()
    # Each time at another place.
    seen = cluster.wait_for_step(300 + 137 * repetition)
    cluster.signal_all(number, number)
    ended = cluster.end(40)
    assert ended.codes == {"worker:0": 143, "worker:1": 0, "ps:0": 0, "ps:1": 0}, cluster.all_said()
    assert (ended.result["status"], ended.result["stopped_by"]) == ("preempted", number.name)
    assert ended.step is not None
    assert ended.step >= seen
    assert newest_checkpoint(cluster) == ended.step
    for task in ("worker:1", "ps:0", "ps:1"):
        said = cluster.said(task)
        how = f"{task}: {number.name}; it serves until the chief has saved, or does without it, at most 30 s"
        assert how in said, said
        assert f"done  | {task} | the chief has finished" in said
    if not repetition:
        hosts.report(47, f"{number.name} twice to all processes of all tasks", "saved and exited", ended)


@pytest.mark.parametrize("secs", [0.5, 2.0, 4.0])
def test_a_signal_before_training_ends_all_tasks_in_order(hosts: Hosts, secs: float) -> None:
    network = hosts.network(4)
    cluster = hosts.cluster(network, four(network), "train.steps=1000000")
    cluster.start()
    wait_until(lambda: all(catches(cluster.pids(task)[0], signal.SIGTERM) for task in cluster.tasks), 60, "they do")
    time.sleep(secs)
    cluster.signal_all(signal.SIGTERM, signal.SIGTERM)
    ended = cluster.end(40)
    assert ended.codes["worker:0"] == 143, cluster.all_said()
    # One that has not read its config yet does not know that it is not the chief.
    assert set(ended.codes.values()) <= {0, 143}, cluster.all_said()
    for task in cluster.tasks:
        assert "kdist: error" not in cluster.said(task), cluster.all_said()
    hosts.report(48, f"SIGTERM to all {secs:g} s after the start", "exited in order", ended)


def test_all_reduce_workers_save_and_end(hosts: Hosts) -> None:
    network = hosts.network(3)
    cluster = hosts.cluster(
        network, {f"worker:{index}": host for index, host in enumerate(network.hosts)}, "train.steps=1000000"
    )
    cluster.start()
    cluster.wait_for_step(200)
    cluster.signal_all(signal.SIGTERM, signal.SIGTERM)
    ended = cluster.end(40)
    assert ended.codes == {"worker:0": 143, "worker:1": 0, "worker:2": 0}, cluster.all_said()
    assert newest_checkpoint(cluster) == ended.step
    hosts.report(47, "SIGTERM twice to all-reduce workers", "saved and exited", ended)


def test_the_only_server_that_is_told_to_stop_serves_for_the_grace_period(hosts: Hosts) -> None:
    network = hosts.network(3)
    tasks = dict(zip(("worker:0", "worker:1", "ps:0"), network.hosts))
    cluster = hosts.cluster(network, tasks, "train.steps=1000000", "run.grace_secs=6")
    cluster.start()
    cluster.wait_for_step(300)
    os.kill(cluster.pids("ps:0")[0], signal.SIGTERM)
    assert cluster.code_of("ps:0", 20) == 143
    assert "the chief has not ended 6 s after SIGTERM (run.grace_secs)" in cluster.said("ps:0")
    assert cluster.code_of("worker:0", 30) == 75
    ended = cluster.end(20)
    hosts.report(49, "SIGTERM to the only server", "it served for run.grace_secs; then the run ended", ended)


def test_tasks_join_from_other_hosts_and_leave_hosts_that_are_switched_off(hosts: Hosts) -> None:
    network = hosts.network(6)
    cluster = hosts.cluster(network, four(network), "train.steps=1000000")
    cluster.start()
    cluster.wait_for_step(300)
    cluster.join("worker:2", network.hosts[4])
    cluster.wait_for(r"resize \| .* 2ps2w -> 2ps3w")
    cluster.join("ps:2", network.hosts[5])
    cluster.wait_for(r"resize \| .* 2ps3w -> 3ps3w")
    # A spot machine gets a notice; another one is drained, which has values.
    for task, host, after in (("worker:1", 1, "3ps2w"), ("ps:1", 3, "2ps2w")):
        os.kill(cluster.pids(task)[0], signal.SIGTERM)
        assert cluster.code_of(task, 40) == 0, cluster.all_said()
        assert f"done  | {task} | it has left" in cluster.said(task)
        cluster.wait_for(rf"resize \| .* -> {after}")
        network.cut(network.hosts[host])
    cluster.wait_for_step(cluster.newest_step() + 1000)
    os.kill(cluster.pids("worker:0")[0], signal.SIGTERM)
    ended = cluster.end(60)
    assert ended.codes == {"worker:0": 143, "worker:1": 0, "worker:2": 0, "ps:0": 0, "ps:1": 0, "ps:2": 0}
    assert ended.result["restarts"] == {"worker": 0, "cluster": 0}
    assert [each["to"] for each in ended.result["resizes"]] == ["2ps3w", "3ps3w", "3ps2w", "2ps2w"]
    assert newest_checkpoint(cluster) == ended.step
    hosts.report(57, "hosts of a worker and a server are drained, and cut off", "others had joined; it went on", ended)


def test_all_reduce_workers_join_from_another_host_and_leave_hosts_that_are_switched_off(hosts: Hosts) -> None:
    network = hosts.network(4)
    cluster = hosts.cluster(network, three(network), "train.steps=1000000")
    cluster.start()
    cluster.wait_for_step(300)
    cluster.join("worker:3", network.hosts[3])
    cluster.wait_for(r"resize \| .* 3w -> 4w")
    os.kill(cluster.pids("worker:1")[0], signal.SIGTERM)
    assert cluster.code_of("worker:1", 40) == 0, cluster.all_said()
    cluster.wait_for(r"resize \| .* 4w -> 3w")
    network.cut(network.hosts[1])
    cluster.wait_for_step(cluster.newest_step() + 1000)
    os.kill(cluster.pids("worker:0")[0], signal.SIGTERM)
    ended = cluster.end(60)
    assert ended.codes == {"worker:0": 143, "worker:1": 0, "worker:2": 0, "worker:3": 0}, cluster.all_said()
    assert ended.result["restarts"] == {"worker": 0, "cluster": 0}
    assert newest_checkpoint(cluster) == ended.step
    hosts.report(57, "all-reduce: a worker joins, another one's host is drained, and cut off", "it went on", ended)
