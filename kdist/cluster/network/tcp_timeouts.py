"""Limits how long TensorFlow waits for a host that falls silent.

A host that loses its power or its network closes no connection. Linux aborts one only after 16 minutes, and until then
TensorFlow waits in places where nothing else of this process runs. TensorFlow and gRPC have no option for it, but a
process may set TCP_USER_TIMEOUT and keepalive on any of its sockets; see tcp(7).
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
from collections.abc import Collection
from contextlib import suppress

from kdist.cluster.network import port_probe
from kdist.cluster.network.names import peers_at, plain
from kdist.cluster.network.sockets import tcp_sockets

_CHECK_SECS, _DISCONNECTED_CHECK_SECS = 1.0, 0.25
# linux/tcp.h, net/tcp_states.h; Linux has the first it since 6.15.
_TCP_RTO_MAX_MS = 44
_SYN_SENT = "02"
_RTO_MAX_SECS = 2.0
# A connection must end before its task counts as lost, so that nobody waits for it then.
_SHARE_OF_PATIENCE = 0.9


class TcpTimeouts:
    """From `start` to `stop`, connections of this process with tasks of the cluster end after some seconds of silence.

    Other connections of the process are not touched. New ones are found within a second. Works on Linux; on other
    systems their own limits apply.

    Args:
        addresses: `host:port` of tasks that this process connects to.
        own_ports: ports that this process serves at.
        patience: seconds of silence after which a task counts as lost; connections end somewhat earlier.
    """

    def __init__(self, addresses: Collection[str], own_ports: Collection[int], patience: float) -> None:
        self._addresses = set(addresses)
        self._own_ports = set(own_ports)
        self._secs = _SHARE_OF_PATIENCE * patience
        #: IP addresses and ports of tasks that were resolved so far.
        self._resolved: set[tuple[str, int]] = set()
        #: Sockets that need not be looked at again, by their inodes.
        self._settled: set[int] = set()
        #: Addresses of tasks that are lost.
        self._disconnected: set[str] = set()
        #: Held while connections are closed, so that none is closed after `reconnect`.
        self._ending = threading.Lock()
        self._changed = threading.Event()
        self._is_stopped = False

    def add(self, address: str) -> None:
        """Limits the connections with another task as well."""
        self._addresses = self._addresses | {address}
        self._settled.clear()

    def start(self) -> None:
        if sys.platform == "linux":
            threading.Thread(target=self._work, daemon=True, name="kdist-tcp-timeouts").start()

    def stop(self) -> None:
        """Leaves future connections as they are."""
        self._is_stopped = True
        self._changed.set()

    def set_limits(self) -> None:
        """Sets the limits on every connection that has none yet."""
        present = set()
        for inode, connection in tcp_sockets():
            present.add(inode)
            with connection:
                if inode not in self._settled and self._is_settled(connection):
                    self._settled.add(inode)
        self._settled &= present

    def disconnect(self, address: str) -> None:
        """Closes the connections with a task that is lost, as if its host had closed them: whatever waits for it fails.

        Closes new ones at once, until `reconnect`: TensorFlow would wait 20 s for each.
        """
        if sys.platform == "linux":
            self._disconnected.add(address)
            with suppress(OSError):
                self._end_connections()
            self._changed.set()

    def reconnect(self, address: str) -> None:
        with self._ending:
            self._disconnected.discard(address)

    def _work(self) -> None:
        while not self._is_stopped:
            # A process that cannot open more files for a moment must not lose its limits for good.
            with suppress(OSError):
                self.set_limits()
                self._end_connections()
            self._changed.wait(_DISCONNECTED_CHECK_SECS if self._disconnected else _CHECK_SECS)
            self._changed.clear()

    def _end_connections(self) -> None:
        """Closes the connections with disconnected tasks, also while they are being established."""
        resolved = {address: peers_at(address) for address in list(self._disconnected)}
        if not resolved:
            return
        with self._ending:
            of_tasks = {found for address in self._disconnected & resolved.keys() for found in resolved[address]}
            # Only hosts without any other task.
            hosts = {host for host, _ in of_tasks} - {
                host for host, port in self._resolved if (host, port) not in of_tasks
            }
            begun = _pending_connections()
            for inode, connection in tcp_sockets():
                with connection, suppress(OSError):
                    if inode in port_probe.in_use:
                        continue
                    # A connection that is being established has no peer yet, according to its socket.
                    host, port = begun[inode] if inode in begun else _peer_of(connection)
                    # The port from which a task connects to this process does not identify it.
                    if (host, port) in of_tasks or (host in hosts and connection.getsockname()[1] in self._own_ports):
                        connection.shutdown(socket.SHUT_RDWR)

    def _is_settled(self, connection: socket.socket) -> bool:
        """Sets the limits if it is a connection of the cluster; False if it may become one."""
        try:
            peer = _peer_of(connection)
        except OSError:
            # It listens, or is being connected.
            return False
        with suppress(OSError):
            if connection.getsockname()[1] in self._own_ports or self._is_task(peer):
                self._limit(connection)
        return True

    def _is_task(self, peer: tuple[str, int]) -> bool:
        if peer not in self._resolved:
            # Names are resolved again: a task may have moved.
            for address in self._addresses:
                if address.endswith(f":{peer[1]}"):
                    self._resolved |= peers_at(address)
        return peer in self._resolved

    def _limit(self, connection: socket.socket) -> None:
        if sys.platform != "linux":
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            socket.TCP_USER_TIMEOUT: round(1000 * self._secs),
            socket.TCP_KEEPIDLE: max(1, int(self._secs / 4)),
            socket.TCP_KEEPINTVL: max(1, int(self._secs / 4)),
            socket.TCP_KEEPCNT: 4,
            # Otherwise a host that was away for 7 s may be retried only after 13 s. Last: most kernels do not have it.
            _TCP_RTO_MAX_MS: round(1000 * _RTO_MAX_SECS),
        }
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _pending_connections() -> dict[int, tuple[str, int]]:
    """The targets of connections that are being established, by the inodes of their sockets; see proc(5)."""
    found = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError), open(table, encoding="utf-8") as lines:
            next(lines)
            for line in lines:
                fields = line.split()
                if fields[3] == _SYN_SENT:
                    address, port = fields[2].split(":")
                    # Words of 32 bits in the order of this machine's bytes.
                    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
                    host = str(ipaddress.ip_address(b"".join(words)))
                    found[int(fields[9])] = (plain(host), int(port, 16))
    return found


def _peer_of(connection: socket.socket) -> tuple[str, int]:
    host, port = connection.getpeername()[:2]
    return plain(host), port
