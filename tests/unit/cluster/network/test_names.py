"""Servers that anybody could reach are refused."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kdist.cluster.network import names as host_names
from kdist.cluster.network.names import check_private, is_private, look_up
from kdist.cluster.resolve import membership_of
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("172.31.0.1", True),
        ("172.32.0.1", False),
        ("192.168.1.1", True),
        ("169.254.1.1", True),
        ("100.64.0.1", True),
        ("100.127.255.254", True),
        ("100.128.0.1", False),
        ("8.8.8.8", False),
        ("::1", True),
        ("fe80::1", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("2606:4700::1111", False),
        ("::ffff:8.8.8.8", False),
        ("::ffff:10.0.0.1", True),
        ("::ffff:100.64.0.1", True),
    ],
)
def test_private_is_what_the_internet_does_not_reach(address: str, expected: bool) -> None:
    assert is_private(address) is expected


def names(hosts: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    known = {"inside": ("10.0.0.1",), "outside": ("8.8.4.4",), "both": ("10.0.0.1", "2606:4700::1111")}
    return {host: known[host] for host in hosts if host in known}


@pytest.mark.parametrize("address", ["10.0.0.1:2222", "[fd00::1]:2222", "inside:2222", "nobody-knows:2222"])
def test_private_and_unknown_addresses_pass(address: str) -> None:
    check_private({"ps:0": address}, names)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("8.8.8.8:2222", "8.8.8.8:2222,"),
        ("[2606:4700::1111]:2222", "[2606:4700::1111]:2222,"),
        ("outside:2222", "outside:2222 (8.8.4.4),"),
        ("both:2222", "both:2222 (2606:4700::1111),"),
    ],
)
def test_a_public_address_is_refused_by_task_and_address(address: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_private({"ps:0": "10.0.0.1:2222", "worker:1": address}, names)
    assert str(error.value).startswith(f"worker:1 is at {said}")
    assert "cluster.allow_unprotected_network=true" in str(error.value)


@pytest.mark.parametrize("place", ["ps", "worker", "chief"])
@pytest.mark.parametrize("kind", ["hosts", "tf_config"])
def test_every_address_of_a_cluster_is_looked_at(kind: str, place: str) -> None:
    cluster = {"ps": ["10.0.0.1:1"], "worker": ["10.0.0.2:1"], "chief": ["10.0.0.3:1"]}
    task = "chief" if place == "chief" else f"{place}:0"

    def membership(**keys: Any) -> Any:
        if kind == "tf_config":
            text = json.dumps({"cluster": cluster, "task": {"type": "ps", "index": 0}})
            return membership_of(ClusterConfig("tf_config", **keys), {"TF_CONFIG": text})
        hosts: dict[str, Any] = {**cluster, "chief": cluster["chief"][0]}
        return membership_of(ClusterConfig("hosts", job="ps", **hosts, **keys), {})

    assert membership() is not None
    cluster[place] = ["8.8.8.8:1"]
    with pytest.raises(ConfigError, match=f"{task} is at 8.8.8.8:1"):
        membership()
    assert membership(allow_unprotected_network=True) is not None


def test_numbers_that_the_system_reads_as_an_address_are_looked_up() -> None:
    # inet_aton(3) takes 134744072 for 8.8.8.8.
    with pytest.raises(ConfigError, match=r"134744072:2222 \(8\.8\.8\.8\)"):
        check_private({"ps:0": "134744072:2222"})


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "_LOOKUP_SECS", 0.05)
    released = socket.socketpair()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released[0].recv(1))
    started = time.monotonic()
    assert look_up.__wrapped__(frozenset({"one", "two"})) == {}
    assert time.monotonic() - started < 2
    for one in released:
        one.close()


def test_tasks_that_others_start_cannot_be_isolated() -> None:
    config = ClusterConfig("hosts", job="ps", ps=["10.0.0.1:1"], worker=["10.0.0.2:1"], isolate="must")
    with pytest.raises(ConfigError, match=r"cluster\.isolate=must: is for tasks that kdist starts"):
        membership_of(config, {})


def test_grpc_reaches_the_tasks_without_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    monkeypatch.setenv("no_proxy", "example.com")
    addresses = ["127.0.0.1:2222", "[fd00::1]:2222", "host2:2223", "host2:2224"]
    hosts = "example.com,localhost,127.0.0.1,fd00::1,host2"
    assert host_names.without_proxy(addresses) == {"no_grpc_proxy": hosts}
