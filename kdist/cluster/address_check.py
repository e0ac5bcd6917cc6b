"""Accepts only private addresses for TensorFlow's servers, which serve every client that reaches them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import cache, partial

from kdist.errors import ConfigError
from kdist.threads import in_thread

_LOOKUP_SECS = 3.0
# Providers share one address among many customers with it (RFC 6598); it cannot be reached from the internet.
_SHARED = ipaddress.ip_network("100.64.0.0/10")

Lookup = Callable[[frozenset[str]], Mapping[str, tuple[str, ...]]]


def is_private(address: str) -> bool:
    """Whether an IP address cannot be reached from the internet: private, loopback, link-local or shared."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_private or ip.is_loopback or ip.is_link_local or ip in _SHARED


def check_private(addresses: Mapping[str, str], lookup: Lookup | None = None) -> None:
    """Refuses tasks at public addresses, or at names that resolve to them.

    A name that cannot be resolved here passes.

    Args:
        addresses: `host:port` by task.
        lookup: returns the IP addresses of host names, without names that cannot be resolved.

    Raises:
        ConfigError: names the task and its address.
    """
    hosts = {task: address.rpartition(":")[0].strip("[]") for task, address in addresses.items()}
    found = (lookup or look_up)(frozenset(host for host in hosts.values() if not _is_ip(host)))
    for task, host in hosts.items():
        for address in [host] if _is_ip(host) else found.get(host, ()):
            if not is_private(address):
                where = addresses[task] if address == host else f"{addresses[task]} ({address})"
                raise ConfigError(
                    f"{task} is at {where}, a public address, and TensorFlow's servers run what anybody sends them: "
                    "use a private network. cluster.allow_unprotected_network=true accepts it: whoever reaches the "
                    "ports of the tasks can then run code as you, from anywhere unless a firewall is in between"
                )


@cache
def look_up(hosts: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """The IP addresses of those names that resolve within a few seconds."""

    def look(host: str) -> tuple[str, ...]:
        return tuple(str(entry[4][0]) for entry in socket.getaddrinfo(host, None))

    # The system offers no timeout for it.
    found = {host: in_thread(partial(look, host)) for host in sorted(hosts)}
    in_time = wait(found.values(), _LOOKUP_SECS).done
    return {host: of.result() for host, of in found.items() if of in in_time and of.exception() is None}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
