"""Accepts only private addresses for TensorFlow's servers, which serve every client that reaches them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

from kdist.cluster.network.names import host_and_port, is_ip, look_up, plain
from kdist.errors import ConfigError

# Providers share one address among many customers with it (RFC 6598); it cannot be reached from the internet.
_SHARED = ipaddress.ip_network("100.64.0.0/10")


def is_private(address: str) -> bool:
    """Tells whether an IP address cannot be reached from the internet: private, loopback, link-local or shared."""
    ip = ipaddress.ip_address(plain(address))
    return ip.is_private or ip.is_loopback or ip.is_link_local or ip in _SHARED


def check_private(
    addresses: Mapping[Any, str], lookup: Callable[[frozenset[str]], Mapping[str, tuple[str, ...]]] = look_up
) -> None:
    """Refuses tasks at public addresses, or at names that resolve to them; a name that is unknown here passes.

    Args:
        addresses: `host:port` by task.
        lookup: returns the IP addresses of host names, without names that cannot be resolved.

    Raises:
        ConfigError: names the task and its address.
    """
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
