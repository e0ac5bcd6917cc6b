"""Who is there: the tasks of a cluster look for each other before TensorFlow does, which would wait without a bound."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from kdist.cluster.spec import Task
from kdist.errors import ClusterError

_PROBE_SECS = 0.5
_POLL_SECS = 0.1


def accepts_connections(address: str, timeout: float = _PROBE_SECS) -> bool:
    """Whether somebody listens at `address`, `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError:
        return False
    return True


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
    family = socket.AF_INET6 if workers[index].startswith("[") else socket.AF_INET
    with socket.socket(family) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", int(workers[index].rpartition(":")[2])))
        except OSError:
            me = Task("worker", index)
            raise ClusterError(f"{me} cannot serve at {workers[index]}: the address is in use") from None
        own.listen(len(workers))
        while missing := {task: address for task, address in missing.items() if not accepts_connections(address)}:
            if time.monotonic() > deadline:
                names = ", ".join(f"{task} ({address})" for task, address in missing.items())
                raise ClusterError(f"{names} did not answer within {timeout:g} s (cluster.start_timeout)")
            time.sleep(_POLL_SECS)
