"""Workers without servers look for each other before TensorFlow does, which would wait without a bound."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from kdist.cluster.port_probe import accepts_connections
from kdist.cluster.spec import Task
from kdist.errors import ClusterError

_POLL_SECS = 0.1


def meet(workers: Sequence[str], index: int, timeout: float) -> None:
    """Returns when all workers are there; the address of this one is free again then, for TensorFlow's server.

    A worker is there when somebody listens at its address: it, in here, or its server, when it has met the others.

    Args:
        workers: addresses of all.
        index: of this one.
        timeout: seconds to wait.

    Raises:
        ClusterError: names those that did not come; or the own address is in use.
    """
    deadline = time.monotonic() + timeout
    missing = {Task("worker", i): address for i, address in enumerate(workers) if i != index}
    try:
        own = _listening(int(workers[index].rpartition(":")[2]), len(workers))
    except OSError:
        me = Task("worker", index)
        raise ClusterError(f"{me} cannot serve at {workers[index]}: the address is in use") from None
    with own:
        while missing := {task: address for task, address in missing.items() if not accepts_connections(address)}:
            if time.monotonic() > deadline:
                names = ", ".join(f"{task} ({address})" for task, address in missing.items())
                raise ClusterError(f"{names} did not answer within {timeout:g} s (cluster.start_timeout)")
            time.sleep(_POLL_SECS)


def _listening(port: int, backlog: int) -> socket.socket:
    """A socket that listens on all interfaces, by IPv4 and IPv6 as far as the system has them."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)
