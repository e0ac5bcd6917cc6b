"""Hosts that are away for a while or for ever, between clusters that go on and clusters that end with a way on."""

from __future__ import annotations

import os
import signal
import time

import pytest
from clusters import HostCluster, Hosts, four, three

pytestmark = [pytest.mark.cluster, pytest.mark.long]

STEADY = ("train.steps_per_call=16", "cluster.step_timeout=20")
ENDLESS = "train.steps=1000000"


def longest_pause(cluster: HostCluster, secs: float) -> float:
    """For how long training stood still at most, within the next seconds."""
    newest, since, longest = cluster.newest_step(), time.monotonic(), 0.0
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        time.sleep(0.1)
        # Also back, to a checkpoint.
        if (step := cluster.newest_step()) != newest:
            newest, since = step, time.monotonic()
        longest = max(longest, time.monotonic() - since)
    return longest


def rate(cluster: HostCluster, secs: float = 8.0) -> float:
    """Steps a second, measured from outside, from one line of the chief to another."""
    first = cluster.newest_step()
    cluster.wait_for_step(first + 1)
    began, first = time.monotonic(), cluster.newest_step()
    time.sleep(secs)
    second = cluster.newest_step()
    cluster.wait_for_step(second + 1)
    return (cluster.newest_step() - first) / (time.monotonic() - began)


@pytest.mark.parametrize("secs", [2, 8])
def test_a_worker_that_is_away_for_seconds_is_not_lost(hosts: Hosts, secs: int) -> None:
    network = hosts.network(4)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, "train.steps=20000")
    cluster.start()
    cluster.wait_for_step(1000)
    network.cut(tasks["worker:1"])
    time.sleep(secs)
    network.mend(tasks["worker:1"])
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["restarts"]) == (20000, {"worker": 0, "cluster": 0})
    assert "is lost" not in ended.console
    hosts.report(41, f"a worker's host away for {secs} s", "waited for", ended)


def test_a_worker_that_is_away_when_training_ends_learns_of_it(hosts: Hosts) -> None:
    network = hosts.network(4)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, "train.steps=4000", "train.steps_per_epoch=4000")
    cluster.start()
    cluster.wait_for_step(1000)
    network.cut(tasks["worker:1"])
    # The other one does what is left, and the chief waits for the call that this one has begun.
    time.sleep(10)
    network.mend(tasks["worker:1"])
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(tasks, 0), cluster.all_said()
    assert "is lost" not in ended.console
    hosts.report(41, "a worker's host away at the end", "waited for", ended)


def test_a_worker_that_is_away_for_a_minute_is_lost_and_taken_back(hosts: Hosts) -> None:
    network = hosts.network(4)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, ENDLESS)
    cluster.start()
    cluster.wait_for_step(1000)
    network.cut(tasks["worker:1"])
    cut_at = time.monotonic()
    cluster.wait_for(r"worker:1 is lost .* for 15 s, cluster.patience\); training continues without it")
    before = cluster.newest_step()
    # It has found out as well, and ends, for a scheduler to start it again.
    assert cluster.code_of("worker:1", 10) == 75
    time.sleep(max(0.0, 60 - (time.monotonic() - cut_at)))
    assert cluster.newest_step() > before
    network.mend(tasks["worker:1"])
    cluster.start("worker:1")
    cluster.wait_for(r"worker:1 is back after")
    cluster.wait_for_step(cluster.newest_step() + 500)
    cluster.signal_all(signal.SIGTERM)
    ended = cluster.end()
    assert ended.codes == {**dict.fromkeys(tasks, 0), "worker:0": 143}, cluster.all_said()
    assert ended.result["restarts"] == {"worker": 1, "cluster": 0}
    assert ended.result["extra_steps"] <= 32
    hosts.report(41, "a worker's host away for 60 s", "training continued without it; readmitted", ended)


def test_a_server_that_is_away_for_8_seconds_is_waited_for(hosts: Hosts) -> None:
    network = hosts.network(4)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, "train.steps=8000")
    cluster.start()
    cluster.wait_for_step(1000)
    network.cut(tasks["ps:1"])
    time.sleep(8)
    network.mend(tasks["ps:1"])
    ended = cluster.end()
    assert ended.codes == dict.fromkeys(tasks, 0), cluster.all_said()
    assert (ended.step, ended.result["restarts"]) == (8000, {"worker": 0, "cluster": 0})
    hosts.report(42, "a server's host away for 8 s", "waited for", ended)


def test_a_server_that_is_away_for_ever_ends_the_run_with_the_way_on(hosts: Hosts) -> None:
    network = hosts.network(4, routed=True)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, ENDLESS, "hooks.checkpoint.every_steps=500")
    cluster.start()
    cluster.wait_for_step(1000)
    network.cut(tasks["ps:1"])
    cut_at = time.monotonic()
    assert cluster.code_of("worker:0", 45) == 75
    assert time.monotonic() - cut_at < 30
    assert "kdist: error: ps:1 is lost (host3:2222 has not responded for 15 s, cluster.patience)" in cluster.said(
        "worker:0"
    )
    assert "resumes from checkpoints/ckpt-" in cluster.said("worker:0")
    ended = cluster.end(30)
    assert set(ended.codes.values()) == {75}, cluster.all_said()
    hosts.report(42, "a server's host silent for ever", "exited, naming it and the checkpoint to resume", ended)


@pytest.mark.alone
@pytest.mark.parametrize("routed", [False, True], ids=["neighbour", "routed"])
def test_training_goes_on_without_a_worker_whose_host_is_silent_for_ever(hosts: Hosts, routed: bool) -> None:
    network = hosts.network(4, routed=routed)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, ENDLESS)
    cluster.start()
    cluster.wait_for_step(2000)
    before = rate(cluster)
    network.cut(tasks["worker:1"])
    # cluster.step_timeout + 10 s.
    assert longest_pause(cluster, 45) < 30
    # Of two workers, one is left.
    after = rate(cluster)
    assert after > 0.8 * before / 2
    cluster.signal_all(signal.SIGTERM)
    ended = cluster.end()
    assert ended.codes == {"worker:0": 143, "worker:1": 75, "ps:0": 0, "ps:1": 0}, cluster.all_said()
    where = "behind a router, " if routed else ""
    happened = f"training continued without it, at {2 * after / before:.1f} times the rate of one worker before"
    hosts.report(43, f"a worker's host {where}silent for ever", happened, ended)


def test_synchronous_training_goes_on_without_a_worker_whose_host_is_silent(hosts: Hosts) -> None:
    network = hosts.network(4, routed=True)
    tasks = four(network)
    cluster = hosts.cluster(
        network, tasks, *STEADY,
        "strategy=sync_replicas", "strategy.worker_timeout=5", "train.steps=3000", "hooks.checkpoint.every_steps=500",
    )  # fmt: skip
    cluster.start()
    cluster.wait_for_step(500)
    network.cut(tasks["worker:1"])
    # The silence, the wait for it to come back, and updates of one gradient each.
    assert longest_pause(cluster, 40) < 30, cluster.all_said()
    ended = cluster.end(200)
    assert ended.codes == {"worker:0": 0, "worker:1": 75, "ps:0": 0, "ps:1": 0}, cluster.all_said()
    # An update that was torn sends training back; the cluster stays.
    assert (ended.step, ended.result["extra_steps"], ended.result["restarts"]["cluster"]) == (3000, 0, 0)
    hosts.report(43, "sync, a worker's host silent for ever", "updates of fewer gradients", ended)


def test_all_reduce_workers_end_when_the_host_of_their_chief_is_silent(hosts: Hosts) -> None:
    network = hosts.network(3, routed=True)
    cluster = hosts.cluster(network, three(network), *STEADY, ENDLESS)
    cluster.start()
    cluster.wait_for_step(200)
    network.cut(network.hosts[0])
    cut_at = time.monotonic()
    codes = {task: cluster.code_of(task, 45) for task in ("worker:1", "worker:2")}
    assert codes == {"worker:1": 75, "worker:2": 75}, cluster.all_said()
    assert time.monotonic() - cut_at < 30
    assert all("is lost" in cluster.said(task) for task in codes)
    cluster.kill("worker:0")
    ended = cluster.end(10)
    hosts.report(43, "all-reduce, the host of the chief silent for ever", "the others exit", ended, code=75)


def test_all_reduce_workers_go_on_without_one_whose_host_is_silent_until_it_returns(hosts: Hosts) -> None:
    network = hosts.network(3, routed=True)
    cluster = hosts.cluster(network, three(network), *STEADY, ENDLESS, "hooks.checkpoint.every_steps=100")
    cluster.start()
    cluster.wait_for_step(300)
    network.cut(network.hosts[2])
    cut_at = time.monotonic()
    cluster.wait_for(r"resize \| .* 3w -> 2w")
    # The silence, and the wait for it to come back.
    assert time.monotonic() - cut_at < 45, cluster.all_said()
    assert cluster.code_of("worker:2", 45) == 75
    cluster.wait_for_step(cluster.newest_step() + 200)
    network.mend(network.hosts[2])
    cluster.start("worker:2")
    cluster.wait_for(r"resize \| .* 2w -> 3w")
    cluster.wait_for_step(cluster.newest_step() + 200)
    os.kill(cluster.pids("worker:0")[0], signal.SIGTERM)
    ended = cluster.end(60)
    assert ended.codes == {"worker:0": 143, "worker:1": 0, "worker:2": 0}, cluster.all_said()
    assert ended.result["restarts"] == {"worker": 0, "cluster": 1}
    assert [each["to"] for each in ended.result["resizes"]] == ["2w", "3w"]
    hosts.report(43, "all-reduce, a worker's host silent until it is back", "the others went on meanwhile", ended)


def test_when_the_chiefs_host_dies_the_others_end(hosts: Hosts) -> None:
    network = hosts.network(5, routed=True)
    tasks = {**four(network), "chief": network.hosts[4]}
    cluster = hosts.cluster(network, tasks, *STEADY, ENDLESS)
    cluster.start()
    cluster.wait_for_step(1000)
    network.cut(tasks["chief"])
    cut_at = time.monotonic()
    others = [task for task in tasks if task != "chief"]
    codes = {task: cluster.code_of(task, 20) for task in others}
    took = time.monotonic() - cut_at
    assert took < 15
    assert codes == dict.fromkeys(others, 75)
    for task in others:
        assert f"kdist: error: {task}: the chief (chief at host4:2222) is lost" in cluster.said(task)
    cluster.kill("chief")
    ended = cluster.end(10)
    hosts.report(44, "the chief's host dies", f"the others exited after {took:.0f} s", ended, code=75)


def test_a_worker_that_comes_back_under_its_name_at_another_address(hosts: Hosts) -> None:
    network = hosts.network(5)
    tasks = four(network)
    cluster = hosts.cluster(network, tasks, *STEADY, ENDLESS)
    cluster.start()
    cluster.wait_for_step(1000)
    # As a pod that is moved: the old one is gone, the name stands for another host.
    cluster.kill("worker:1")
    network.cut(tasks["worker:1"])
    cluster.wait_for(r"worker:1 is lost")
    network.move(tasks["worker:1"], to=network.hosts[4])
    tasks["worker:1"] = network.hosts[4]
    cluster.start("worker:1")
    cluster.wait_for(r"worker:1 is back after", timeout=90)
    before = cluster.newest_step()
    cluster.wait_for_step(before + 1000)
    cluster.signal_all(signal.SIGTERM)
    ended = cluster.end()
    assert ended.codes == {**dict.fromkeys(tasks, 0), "worker:0": 143}, cluster.all_said()
    assert ended.result["restarts"] == {"worker": 1, "cluster": 0}
    hosts.report(45, "a worker comes back under its name at another address", "readmitted", ended)


def test_a_chief_that_was_killed_is_started_on_another_host(hosts: Hosts) -> None:
    network = hosts.network(4)
    first = hosts.cluster(
        network, dict(zip(("worker:0", "ps:0", "chief"), network.hosts)), ENDLESS, "hooks.checkpoint.every_steps=500"
    )
    first.start()
    first.wait_for(r"save  \| step +500")
    saved = first.newest_step()
    first.kill("chief")
    assert first.end().codes == {"worker:0": 75, "ps:0": 75, "chief": -9}
    second = hosts.cluster(
        network, {"worker:0": network.hosts[0], "ps:0": network.hosts[1], "chief": network.hosts[3]},
        f"train.steps={saved + 1000}",
    )  # fmt: skip
    second.start()
    second.wait_for(r"was in use by process \d+ on host2; waiting for its heartbeat, at most 60 s")
    waits_since = time.monotonic()
    second.wait_for(r"load  \| step +\d+ .*ckpt-\d+")
    assert 55 < time.monotonic() - waits_since < 80
    ended = second.end()
    assert set(ended.codes.values()) == {0}, second.all_said()
    assert ended.step == saved + 1000
    hosts.report(46, "the chief killed -9, started on another host", "waited for its heartbeat; resumed", ended)


def test_a_second_chief_on_another_host_is_refused(hosts: Hosts) -> None:
    network = hosts.network(4)
    first = hosts.cluster(network, dict(zip(("worker:0", "ps:0"), network.hosts)), ENDLESS)
    first.start()
    first.wait_for_step(100)
    second = hosts.cluster(network, dict(zip(("worker:0", "ps:0"), network.hosts[2:])), ENDLESS)
    second.start("worker:0")
    assert second.code_of("worker:0", 60) == 2
    assert "run.dir=D: is in use by process" in second.said("worker:0")
    assert "on host0 since" in second.said("worker:0")
    first.signal_all(signal.SIGTERM)
    ended = first.end()
    assert ended.codes == {"worker:0": 143, "ps:0": 0}
    hosts.report(46, "a second chief on another host", "refused with its name", ended, code=2)
