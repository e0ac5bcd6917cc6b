"""Ports that are kept for tasks."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from kdist.cluster.network.held_ports import HeldPorts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a port and lets a server have it")


def is_for_anybody(port: int) -> bool:
    """Whether a connection from this machine may have the port."""
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
        return True


def serve(port: int, family: int = socket.AF_INET) -> socket.socket:
    """A socket that listens, opened as gRPC opens its own."""
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", port))
    server.listen()
    return server


def test_they_differ_and_nobody_else_gets_them_until_they_are_released() -> None:
    with HeldPorts(50) as held:
        assert len(set(held.numbers)) == 50
        assert not any(map(is_for_anybody, held.numbers))
    assert any(map(is_for_anybody, held.numbers))


def test_nothing_answers_there_before_a_server_does() -> None:
    with HeldPorts(1) as held, socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", held.numbers[0])) == errno.ECONNREFUSED


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_server_may_have_one_and_have_it_again(family: int) -> None:
    with HeldPorts(1) as held:
        (port,) = held.numbers
        for _ in range(2):
            with serve(port, family), socket.create_connection(("127.0.0.1", port)):
                assert not is_for_anybody(port)
            # It is still kept, for the next server.
            assert not is_for_anybody(port)
