"""`cluster.bind`: what comes by another interface does not reach a port; and ports that are kept for tasks."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from helpers import free_ports, wait_until

from kdist.cluster.network import sockets
from kdist.cluster.network.http_server import HttpServer
from kdist.cluster.network.port_probe import accepts_connections
from kdist.errors import ClusterError, ConfigError

ANOTHER = 9999


def why_not() -> str | None:
    try:
        sockets.bind_to("lo")
        sockets.bind_to(None)
    except ConfigError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has filters on sockets, and keeps ports")
needs_filters = pytest.mark.skipif(sys.platform == "linux" and why_not() is not None, reason=f"{why_not()}")


@pytest.fixture
def on_loopback() -> Iterator[None]:
    sockets.bind_to("lo")
    yield
    sockets.bind_to(None)


@pytest.fixture
def elsewhere(on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that arrives comes by another interface than those that are asked for."""
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: ANOTHER)


def refuse(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Gives options of sockets a number that no option has."""
    for option in options:
        monkeypatch.setattr(sockets, option, 32767)


def test_without_filters_a_port_is_bound_to_the_loopback_device(
    on_loopback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for users without privileges, on some systems.
    refuse(monkeypatch, "_SO_ATTACH_FILTER")
    sockets.bind_to("auto", all_here=True)
    assert sockets.bound_to() == "lo"
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        sockets.bind_port(port)
        # Once more, as some time later.
        sockets.bind_port(port)
        assert server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") == b"lo"
        assert accepts_connections(f"127.0.0.1:{port}", 1)


def test_an_interface_that_does_not_exist_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.bind=eth77: there is no such interface; this machine has .*lo"):
        sockets.bind_to("eth77")
    sockets.bind_to(None)


@needs_filters
def test_tasks_of_one_machine_are_bound_to_it_by_default_and_others_are_not() -> None:
    sockets.bind_to("auto", all_here=True)
    # Ports for others, as of probes, stay open.
    assert (sockets.bound_to(), sockets.named()) == ("lo", None)
    sockets.bind_to("auto")
    assert (sockets.bound_to(), sockets.named()) == (None, None)
    sockets.bind_to("lo")
    assert (sockets.bound_to(), sockets.named()) == ("lo", "lo")
    sockets.bind_to(None, all_here=True)
    assert (sockets.bound_to(), sockets.named()) == (None, None)


def test_by_default_a_system_that_refuses_leaves_the_ports_open(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "_SO_ATTACH_FILTER", "_SO_BINDTODEVICE")
    sockets.bind_to("auto", all_here=True)
    assert sockets.bound_to() is None


@needs_filters
def test_this_machine_reaches_a_port_that_is_bound(on_loopback: None) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        sockets.bind_port(port)
        assert accepts_connections(f"127.0.0.1:{port}", 1)
        assert accepts_connections(f"[::1]:{port}", 1)


@needs_filters
def test_others_do_not_reach_a_port_that_is_bound(elsewhere: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        sockets.bind(server, None)
        assert accepts_connections(f"{host}:{port}", 1)
        sockets.bind_port(port)
        assert not accepts_connections(f"{host}:{port}", 0.3)


@needs_filters
def test_connections_from_before_the_port_was_bound_fall_silent(elsewhere: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as early:
        sockets.bind_port(server.getsockname()[1])
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
def test_a_port_that_this_process_does_not_have_is_an_error(on_loopback: None) -> None:
    (port,) = free_ports(1)
    with pytest.raises(ClusterError, match=rf"no socket of this process listens at port {port}"):
        sockets.bind_port(port)


def test_a_system_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "_SO_ATTACH_FILTER", "_SO_BINDTODEVICE")
    with pytest.raises(ConfigError, match=r"cluster\.bind=lo: the system does not permit filters on sockets"):
        sockets.bind_to("lo")


def is_for_anybody(port: int) -> bool:
    """Whether a connection from this machine may have the port."""
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
        return True


def served(port: int, family: int = socket.AF_INET) -> socket.socket:
    """A socket that listens, opened as gRPC opens its own."""
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", port))
    server.listen()
    return server


def test_they_differ_and_nobody_else_gets_them_until_they_are_released() -> None:
    with sockets.held_ports(50) as numbers:
        assert len(set(numbers)) == 50
        assert not any(map(is_for_anybody, numbers))
    assert any(map(is_for_anybody, numbers))


def test_nothing_answers_there_before_a_server_does() -> None:
    with sockets.held_ports(1) as (port,), socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_server_may_have_one_and_have_it_again(family: int) -> None:
    with sockets.held_ports(1) as (port,):
        for _ in range(2):
            with served(port, family), socket.create_connection(("127.0.0.1", port)):
                assert not is_for_anybody(port)
            # It is still kept, for the next server.
            assert not is_for_anybody(port)
