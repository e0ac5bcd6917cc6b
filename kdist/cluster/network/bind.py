"""Binds the ports of this process to one network interface, as `cluster.bind` says.

TensorFlow's servers listen at every address, and have no option for it. But a process may attach a filter to any of its
sockets, and Linux drops what the filter rejects before the socket gets it: here, packets that come by another
interface, so that nobody there can connect. What this machine sends to itself, at whatever address, passes the loopback
device, and is let in. See socket(7), SO_ATTACH_FILTER, and "BPF extensions" in the kernel's networking/filter.rst.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

from kdist.cluster.network.own_sockets import tcp_sockets
from kdist.errors import ClusterError, ConfigError

_LOOPBACK = "lo"
# asm-generic/socket.h
_SO_ATTACH_FILTER = 26
# linux/filter.h: load a word, return if it is equal, return; and where a packet's interface is.
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_INTERFACE_INDEX = (-0x1000 + 8) & 0xFFFFFFFF
_ALL_BYTES, _NO_BYTES = 0xFFFFFFFF, 0
#: When connections are looked for that were made before the filter, and that TensorFlow has taken up since; seconds.
_LATER = (0.1, 1.0)


def check(interface: str | None) -> None:
    """Finds out whether ports can be bound to an interface; None is none.

    Raises:
        ConfigError: there is no such interface, or the system does not permit it.
    """
    if interface is None:
        return
    if sys.platform != "linux":
        raise ConfigError(f"cluster.bind={interface}: only Linux filters what a socket gets")
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ConfigError(f"cluster.bind={interface}: there is no such interface; this machine has {', '.join(known)}")
    with socket.socket() as own:
        bind(own, interface)


def bind(own: socket.socket, interface: str | None) -> None:
    """Binds one socket, also one that listens already; None leaves it open to all.

    Raises:
        ConfigError: the system does not permit it.
    """
    if interface is None:
        return
    program = _Program(interface)
    try:
        own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program.as_option())
    except OSError as error:
        raise ConfigError(
            f"cluster.bind={interface}: the system does not permit filters on sockets ({error.strerror}); some permit "
            "them to root only, or with the capability CAP_NET_ADMIN"
        ) from None


def bind_port(port: int, interface: str | None) -> None:
    """Binds every socket of this process at a port that TensorFlow has opened; None leaves it open to all.

    Raises:
        ConfigError: the system does not permit it.
        ClusterError: no socket is there.
    """
    if interface is None:
        return
    if not _bind_all(port, interface):
        raise ClusterError(f"cluster.bind={interface}: no socket of this process listens at port {port}")

    def bind_later() -> None:
        for secs in _LATER:
            time.sleep(secs)
            with suppress(OSError, ConfigError):
                _bind_all(port, interface)

    threading.Thread(target=bind_later, daemon=True, name="kdist-bind").start()


def _bind_all(port: int, interface: str) -> int:
    """Binds connections and listening sockets, whose future connections inherit it; returns how many listen."""
    count = 0
    for _, found in tcp_sockets():
        with found:
            if found.getsockname()[1] == port:
                bind(found, interface)
                count += found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return count


class _Program:
    """A filter that lets packets pass that come by an interface, or by the loopback device."""

    def __init__(self, interface: str) -> None:
        indices = [socket.if_nametoindex(name) for name in (interface, _LOOPBACK)]
        steps = [
            (_LOAD_WORD, 0, 0, _INTERFACE_INDEX),
            # Over the other comparisons, and over the step that rejects.
            *((_JUMP_IF_EQUAL, len(indices) - place, 0, index) for place, index in enumerate(indices)),
            (_RETURN, 0, 0, _NO_BYTES),
            (_RETURN, 0, 0, _ALL_BYTES),
        ]
        self._length = len(steps)
        self._code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

    def as_option(self) -> bytes:
        """A `struct sock_fprog`, valid as long as this object."""
        return struct.pack("HP", self._length, ctypes.addressof(self._code))
