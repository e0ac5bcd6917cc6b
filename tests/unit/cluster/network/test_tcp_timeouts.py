"""Connections with tasks of a cluster are given up in time; no other connection of the process is touched."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import wait_until

from kdist.cluster.network import port_probe, tcp_timeouts
from kdist.cluster.network.tcp_timeouts import TcpTimeouts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has TCP_USER_TIMEOUT")


class Pair:
    """A connection on this machine, from both its ends."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily = socket.AF_INET6) -> None:
        dual = family == socket.AF_INET6
        server = stack.enter_context(socket.create_server(("", 0), family=family, dualstack_ipv6=dual))
        self.port = server.getsockname()[1]
        self.client = stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        accepted, _ = server.accept()
        self.served = stack.enter_context(accepted)
        self.client.settimeout(10)
        self.served.settimeout(10)

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def limit_of(connection: socket.socket) -> tuple[int, int]:
    return (
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    )


def test_connections_to_tasks_get_a_limit_and_others_keep_theirs(stack: ExitStack) -> None:
    task, other = Pair(stack), Pair(stack)
    TcpTimeouts([task.address], [], 10).set_limits()
    assert limit_of(task.client) == (9000, 1)
    assert task.client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
    for untouched in (task.served, other.client, other.served):
        assert limit_of(untouched) == (0, 0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_that_tasks_make_get_one_too(stack: ExitStack, family: socket.AddressFamily) -> None:
    own = Pair(stack, family)
    TcpTimeouts([], [own.port], 10).set_limits()
    assert limit_of(own.served) == (9000, 1)


def test_connections_that_come_later_are_found(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_timeouts, "_CHECK_SECS", 0.01)
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = server.getsockname()[1]
    timeouts = TcpTimeouts([f"127.0.0.1:{port}"], [], 10)
    timeouts.start()
    try:
        later = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        wait_until(lambda: limit_of(later) == (9000, 1), 10, "the limit is set")
    finally:
        timeouts.stop()


def test_a_task_that_is_disconnected_stays_so_until_it_is_reconnected(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_timeouts, "_DISCONNECTED_CHECK_SECS", 0.01)
    task, other = Pair(stack), Pair(stack)
    timeouts = TcpTimeouts([task.address, other.address], [], 10)
    timeouts.start()
    try:
        timeouts.disconnect(task.address)
        assert task.client.recv(1) == b""
        other.client.send(b"x")
        assert other.served.recv(1) == b"x"
        again = stack.enter_context(socket.create_connection(("127.0.0.1", task.port)))
        again.settimeout(10)
        assert again.recv(1) == b""
        timeouts.reconnect(task.address)
        for _ in range(3):
            back = stack.enter_context(socket.create_connection(("127.0.0.1", task.port)))
            back.settimeout(0.1)
            with pytest.raises(TimeoutError):
                back.recv(1)
    finally:
        timeouts.stop()


def test_files_keep_their_locks_and_sockets_stay_blocking(stack: ExitStack, tmp_path: Path) -> None:
    task = Pair(stack)
    task.client.setblocking(True)
    file = stack.enter_context((tmp_path / "file").open("w"))
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    socket.setdefaulttimeout(5)
    try:
        TcpTimeouts([task.address], [], 10).set_limits()
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(task.client.fileno())
    # Locks are between processes.
    other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run([sys.executable, "-c", other, tmp_path / "file"], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in done.stderr


def test_who_is_on_the_host_of_a_lost_task_stays_connected(stack: ExitStack) -> None:
    own, lost, neighbour = Pair(stack), Pair(stack), Pair(stack)
    timeouts = TcpTimeouts([lost.address, neighbour.address], [own.port], 10)
    timeouts.set_limits()
    timeouts.disconnect(lost.address)
    assert lost.client.recv(1) == b""
    for connection, end in ((own.client, own.served), (neighbour.client, neighbour.served)):
        connection.send(b"x")
        assert end.recv(1) == b"x"


def test_a_connection_that_is_being_made_ends_as_well_but_not_that_of_a_probe(stack: ExitStack) -> None:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    address = server.getsockname()
    # Linux leaves connections beyond the backlog unanswered.
    made = [stack.enter_context(socket.socket()) for _ in range(6)]
    for connection in made:
        connection.setblocking(False)
        connection.connect_ex(address)
    begun = [c for c in made if tcp_timeouts._pending_connections().get(_inode(c)) == ("127.0.0.1", address[1])]
    assert len(begun) > 1
    port_probe.in_use.add(_inode(begun[0]))
    try:
        TcpTimeouts([], [], 10).disconnect(f"127.0.0.1:{address[1]}")
    finally:
        port_probe.in_use.clear()
    assert {_inode(c) for c in begun} & set(tcp_timeouts._pending_connections()) == {_inode(begun[0])}


def _inode(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino
