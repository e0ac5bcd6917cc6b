"""Ports that are kept for the tasks of this machine until they serve there, and while they are restarted."""

from __future__ import annotations

import socket
import sys


class HeldPorts:
    """TCP ports that were free, and that the system gives to nobody else until they are released.

    Otherwise any connection may get a port after it was found to be free and before a task serves there. On Linux a
    socket that is bound and does not listen keeps the port, and still lets every process serve there that sets
    SO_REUSEADDR, as TensorFlow does. Other systems do not permit both: there the ports are not kept.

    Args:
        count: how many; they differ.

    Attributes:
        numbers: of the ports.
    """

    def __init__(self, count: int) -> None:
        self._sockets = [socket.socket() for _ in range(count)]
        for held in self._sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", 0))
        self.numbers: list[int] = [held.getsockname()[1] for held in self._sockets]
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Leaves the ports to whoever serves there. May be called repeatedly."""
        for held in self._sockets:
            held.close()

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
