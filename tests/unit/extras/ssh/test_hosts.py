from __future__ import annotations

import json

import pytest

from kdist.cluster.resolve import membership_of
from kdist.cluster.spec import EVALUATOR, ClusterShape, Membership, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError
from kdist.extras.ssh.hosts import Host, parse_hosts, tasks_by_host, tf_configs


def test_hosts_are_names_or_addresses_with_slots() -> None:
    assert parse_hosts("h1:2,me@node-2.lab:3,10.0.0.4,[fd00::5]:2") == (
        Host("h1", None, 2),
        Host("node-2.lab", "me", 3),
        Host("10.0.0.4", None, 1),
        Host("fd00::5", None, 2),
    )


def test_ssh_and_tensorflow_write_a_host_in_their_own_ways() -> None:
    host = Host("fd00::5", "me", 2)
    assert (host.login, host.address(2222)) == ("me@fd00::5", "[fd00::5]:2222")
    assert (Host("h1").login, Host("h1").address(2222), Host("h1").address(22, "h1.lab")) == (
        "h1",
        "h1:2222",
        "h1.lab:22",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-H '': cannot be read: the form is host:slots"),
        ("h1:2,", "cannot be read"),
        ("h1:two", "-H h1:two: cannot be read"),
        ("h1:0", "-H h1:0: a host takes at least one task"),
        ("fd00::5:2", "an IPv6 address stands in brackets"),
        ("[fe80::1%eth0]:2", "a scope, as %eth0, means nothing to other hosts"),
        ("-oProxyCommand=x:2", "cannot be read"),
        ("h1;ls:2", "cannot be read"),
        ("h1:1,h2:1,h1:2", "h1 is named twice; add up its slots"),
        ("localhost:2,h2:2", "-H localhost: means a different machine on every host"),
        ("[::1]:2,h2:2", "-H ::1: means a different machine on every host"),
    ],
)
def test_hosts_that_cannot_be_used_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f".*{message}".replace("[", r"\[")):
        parse_hosts(text)


def test_hosts_are_filled_in_order_and_the_chief_comes_first() -> None:
    h1, h2, h3, h4 = parse_hosts("h1:2,h2:1,h3:9,h4:9")
    assert tasks_by_host((h1, h2, h3, h4), ClusterShape.parse("2ps2w1e")) == {
        h1: (Task("worker", 0), Task("worker", 1)),
        h2: (Task("ps", 0),),
        h3: (Task("ps", 1), EVALUATOR),
    }


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="-H has 3 slots, and cluster=2ps2w has 4 tasks: worker:0, worker:1, ps:0, ps:1"
    ):
        tasks_by_host(parse_hosts("h1:2,h2"), ClusterShape.parse("2ps2w"))


@pytest.mark.parametrize("shape", ["2ps2w1e", "3w"])
def test_every_task_learns_its_place_from_tf_config(shape: str) -> None:
    tasks = [
        task for of_host in tasks_by_host(parse_hosts("h1:9"), ClusterShape.parse(shape)).values() for task in of_host
    ]
    configs = tf_configs({task: f"h1:{port}" for port, task in enumerate(tasks, 2222)})
    read = {
        task: membership_of(ClusterConfig("tf_config", allow_unprotected_network=True), {"TF_CONFIG": text})
        for task, text in configs.items()
    }
    spec = read[tasks[0]].spec  # type: ignore[union-attr]
    assert read == {task: Membership(spec, task) for task in tasks}
    assert spec.worker[0] == "h1:2222"
    assert "evaluator" not in json.loads(configs[tasks[-1]])["cluster"]
