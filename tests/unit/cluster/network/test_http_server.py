from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest
from helpers import free_ports

from kdist.cluster.network.http_server import health_of, health_of_task, health_server
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.errors import ConfigError


def asked(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if answer.getheader("Content-Type") == "application/json" else None


def test_a_task_is_alive_before_it_is_ready() -> None:
    (port,) = free_ports(1)
    found = health_of("ps:0", is_ready=False)
    with health_server(port, lambda: found):
        before = {"task": "ps:0", "ready": False, "step": None, "seconds_since_progress": None}
        assert asked(port, "/healthz") == (200, before)
        assert asked(port, "/readyz") == (503, before)
        found = health_of("ps:0", is_ready=True, step=7, seconds_since_progress=0.49)
        after = {"task": "ps:0", "ready": True, "step": 7, "seconds_since_progress": 0.4}
        assert asked(port, "/healthz") == asked(port, "/readyz?x=1") == (200, after)
        assert asked(port, "/")[0] == 404
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_opens_without_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_for_a_name(*_: object) -> str:
        raise AssertionError("a name server that does not respond would keep the port closed")

    for name in ("getfqdn", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, asked_for_a_name)
    (port,) = free_ports(1)
    with health_server(port, lambda: health_of("ps:0", is_ready=True)):
        assert asked(port, "/healthz")[0] == 200


def test_a_task_knows_the_step_from_the_chief() -> None:
    (port,) = free_ports(1)
    spec = ClusterSpec(("[::1]:1",), ("127.0.0.1:2",))
    health = health_of_task(Membership(spec, Task("ps", 0)), port, lambda: True)
    # Nobody answers there.
    assert health() == health_of("ps:0", is_ready=True)
    with health_server(port, lambda: health_of("chief", is_ready=True, step=9, seconds_since_progress=1.5)):
        assert health() == health_of("ps:0", is_ready=True, step=9, seconds_since_progress=1.5)


def test_a_port_that_is_taken_is_an_error_of_the_config() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"run\.health_port={port}: port {port} cannot be used: .*in use"):
            health_server(port, lambda: health_of("ps:0", is_ready=False))
