"""`cluster.bind`: what comes by another interface does not reach a port."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

import pytest
from helpers import free_ports, wait_until

from kdist.cluster.network import bind
from kdist.cluster.network.http_server import HttpServer
from kdist.cluster.network.port_probe import accepts_connections
from kdist.errors import ClusterError, ConfigError

ANOTHER = 9999


def why_not() -> str | None:
    try:
        bind.check("lo")
    except ConfigError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters on sockets")
needs_filters = pytest.mark.skipif(sys.platform == "linux" and why_not() is not None, reason=f"{why_not()}")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that arrives comes by another interface than those that are asked for."""
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: ANOTHER)


def test_an_interface_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.bind=eth77: there is no such interface; this machine has .*lo"):
        bind.check("eth77")
    bind.check(None)


@needs_filters
def test_this_machine_reaches_a_port_that_is_bound() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        bind.bind_port(port, "lo")
        assert accepts_connections(f"127.0.0.1:{port}", 1)
        assert accepts_connections(f"[::1]:{port}", 1)


@needs_filters
def test_others_do_not_reach_a_port_that_is_bound(elsewhere: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        bind.bind(server, None)
        assert accepts_connections(f"{host}:{port}", 1)
        bind.bind_port(port, "lo")
        assert not accepts_connections(f"{host}:{port}", 0.3)


@needs_filters
def test_connections_from_before_the_port_was_bound_fall_silent(elsewhere: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as early:
        bind.bind_port(server.getsockname()[1], "lo")
        # TensorFlow takes it up later.
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(0.05)

            def gets_nothing() -> bool:
                early.send(b"x")
                with suppress(TimeoutError):
                    accepted.recv(1 << 16)
                    return False
                return True

            wait_until(gets_nothing, 5, "it gets nothing any more")


@needs_filters
def test_pages_are_bound_before_anybody_can_connect(elsewhere: None) -> None:
    (port,) = free_ports(1)
    server = HttpServer("run.health_port", "127.0.0.1", port, {}, "lo")
    try:
        assert not accepts_connections(f"127.0.0.1:{port}", 0.3)
    finally:
        server.close()


@needs_filters
def test_a_port_that_this_process_does_not_have_is_an_error() -> None:
    (port,) = free_ports(1)
    with pytest.raises(ClusterError, match=rf"no socket of this process listens at port {port}"):
        bind.bind_port(port, "lo")


def test_a_system_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # No option of this number exists.
    monkeypatch.setattr(bind, "_SO_ATTACH_FILTER", 32767)
    with pytest.raises(ConfigError, match=r"cluster\.bind=lo: the system does not permit filters on sockets"):
        bind.check("lo")
