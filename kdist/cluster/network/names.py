"""Names and addresses of hosts: parsed, looked up within a time limit, which the system lacks, and checked.

Only private addresses are accepted: TensorFlow's servers serve every client that reaches them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from kdist.errors import ClusterError, ConfigError
from kdist.threads import in_thread

_LOOKUP_SECS = 3.0
_RETRY_SECS = 0.5
# Providers share one address among many customers with it (RFC 6598); it cannot be reached from the internet.
_SHARED = ipaddress.ip_network("100.64.0.0/10")

#: The result of `socket.getaddrinfo`.
AddressInfo = list[tuple[Any, Any, int, str, Any]]

#: Lookups that have not ended, by host and port. A second caller waits for the same one: threads must not pile up while
#: a name server is down.
_pending: dict[tuple[str, int], Future[AddressInfo]] = {}


def host_and_port(address: str) -> tuple[str, int]:
    """Splits `host:port`; an IPv6 address loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def own_address(peer: str, timeout: float) -> str:
    """An address of this host, as another one at `peer` reaches it, with a port that is free now.

    Raises `ClusterError` if it cannot be reached within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection(host_and_port(peer), max(0.1, deadline - time.monotonic())) as connection:
                host = connection.getsockname()[0]
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the chief at {peer} did not respond within {timeout:g} s (cluster.start_timeout): {error}"
                ) from None
            time.sleep(_RETRY_SECS)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """While entered, the environment of this process has these variables: a program gets back what it had."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def without_proxy(addresses: Iterable[str]) -> dict[str, str]:
    """A variable of the environment by which gRPC reaches these addresses directly, whatever `https_proxy` says.

    It is gRPC's own, in the place of `no_proxy`: other libraries go on as before.
    """
    before = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", "")).split(",")  # noqa: SIM112 - lower case
    hosts = [host_and_port(address)[0] for address in addresses]
    return {"no_grpc_proxy": ",".join(dict.fromkeys([*filter(None, before), "localhost", "127.0.0.1", *hosts]))}


def is_ip(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def plain(ip: str) -> str:
    """Strips the scope of an IP address; an IPv4 address mapped to IPv6 becomes IPv4 again."""
    host = ip.partition("%")[0]
    parsed = ipaddress.ip_address(host)
    return str(parsed.ipv4_mapped or parsed) if isinstance(parsed, ipaddress.IPv6Address) else host


def address_info(host: str, port: int, timeout: float = _LOOKUP_SECS) -> AddressInfo:
    """Calls `socket.getaddrinfo` for TCP; raises `OSError` after `timeout` seconds, `UnicodeError` if it is no name."""
    try:
        return _lookup(host, port).result(timeout)
    except TimeoutError:
        raise OSError(f"{host}: no answer within {timeout:g} s") from None


def peers_at(address: str) -> set[tuple[str, int]]:
    """The IP addresses of `host:port`, each with the port; empty if the name cannot be resolved."""
    host, port = host_and_port(address)
    with suppress(OSError):
        return {(plain(str(found[4][0])), port) for found in address_info(host, port)}
    return set()


@cache
def look_up(hosts: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Looks up several names at once; returns the IP addresses of names that resolve within a few seconds."""
    lookups = {host: _lookup(host, 0) for host in sorted(hosts)}
    in_time = wait(lookups.values(), _LOOKUP_SECS).done
    found = {host: of.result() for host, of in lookups.items() if of in in_time and of.exception() is None}
    return {host: tuple(str(entry[4][0]) for entry in entries) for host, entries in found.items()}


def _lookup(host: str, port: int) -> Future[AddressInfo]:
    key = host, port
    if (lookup := _pending.get(key)) is None:
        lookup = _pending[key] = in_thread(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
        lookup.add_done_callback(lambda _: _pending.pop(key, None))
    return lookup


def is_private(address: str) -> bool:
    """Tells whether an IP address cannot be reached from the internet: private, loopback, link-local or shared."""
    ip = ipaddress.ip_address(plain(address))
    return ip.is_private or ip.is_loopback or ip.is_link_local or ip in _SHARED


def check_private(
    addresses: Mapping[Any, str], lookup: Callable[[frozenset[str]], Mapping[str, tuple[str, ...]]] = look_up
) -> None:
    """Raises `ConfigError` for tasks at public addresses, or at names that resolve to them; unknown names pass."""
    hosts = {task: host_and_port(address)[0] for task, address in addresses.items()}
    found = lookup(frozenset(host for host in hosts.values() if not is_ip(host)))
    for task, host in hosts.items():
        for address in [host] if is_ip(host) else found.get(host, ()):
            if not is_private(address):
                where = addresses[task] if address == host else f"{addresses[task]} ({address})"
                raise ConfigError(
                    f"{task} is at {where}, a public address, and TensorFlow's servers run what anybody sends them: "
                    "use a private network. cluster.allow_unprotected_network=true accepts it: whoever reaches the "
                    "ports of the tasks can then run code as you, from anywhere unless a firewall is in between"
                )
