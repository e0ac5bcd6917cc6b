"""The TCP sockets of this process: bound to one network interface, as `cluster.bind` says; and ports kept for tasks.

TensorFlow's servers listen at every address, and have no option for it. But a process may attach a filter to any of its
sockets, and Linux drops rejected packets before the socket gets them: here, packets that come by another
interface, so that nobody there can connect. What this machine sends to itself, at whatever address, passes the loopback
device, and is let in. See socket(7), SO_ATTACH_FILTER, and "BPF extensions" in the kernel's networking/filter.rst.
Where filters need privileges, a socket can still be bound to the loopback device alone, by SO_BINDTODEVICE.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from kdist.errors import ClusterError, ConfigError

_LOOPBACK = "lo"
# asm-generic/socket.h
_SO_BINDTODEVICE, _SO_ATTACH_FILTER = 25, 26
# linux/filter.h: load a word, return if it is equal, return; and where a packet's interface is.
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_INTERFACE_INDEX = (-0x1000 + 8) & 0xFFFFFFFF
_ALL_BYTES, _NO_BYTES = 0xFFFFFFFF, 0
#: When connections are looked for that were made before the filter, and that TensorFlow has taken up since; seconds.
_LATER = (0.1, 1.0)
_DESCRIPTORS = "/proc/self/fd"

#: By which a config leaves it to `bind_to`.
AUTO = "auto"
#: The interface of this process, and the one that the user named; None for all.
_interface: str | None = None
_named: str | None = None


def bind_to(interface: str | None, *, all_here: bool = False) -> None:
    """Sets the interface at which this process listens, besides the loopback device.

    Args:
        interface: its name; None for all; `auto` for the loopback device alone where the system permits it, for all
            elsewhere.
        all_here: whether all tasks are on this machine; otherwise `auto` is None.

    Raises:
        ConfigError: there is no such interface, or the system does not permit it.
    """
    global _interface, _named  # noqa: PLW0603 - of the process
    _named = None if interface == AUTO else interface
    if interface == AUTO:
        _interface = _LOOPBACK if all_here and _may_bind() else None
        return
    if interface is not None:
        if sys.platform != "linux":
            raise ConfigError(f"cluster.bind={interface}: works on Linux only")
        known = [name for _, name in socket.if_nameindex()]
        if interface not in known:
            raise ConfigError(
                f"cluster.bind={interface}: there is no such interface; this machine has {', '.join(known)}"
            )
        with socket.socket() as own:
            bind(own, interface)
    _interface = interface


def bound_to() -> str | None:
    """The interface at which this process listens; None for all."""
    return _interface


def named() -> str | None:
    """The interface that the user has named: also for ports that are there for others, as those of probes."""
    return _named


def _may_bind() -> bool:
    try:
        with socket.socket() as own:
            bind(own, _LOOPBACK)
    except (ConfigError, OSError):
        return False
    return sys.platform == "linux"


def bind(own: socket.socket, interface: str | None) -> None:
    """Binds one socket, also one that listens; None leaves it open to all; raises `ConfigError` if not permitted."""
    if interface is None:
        return
    indices = [socket.if_nametoindex(name) for name in (interface, _LOOPBACK)]
    steps = [
        (_LOAD_WORD, 0, 0, _INTERFACE_INDEX),
        # Over the other comparisons, and over the step that rejects.
        *((_JUMP_IF_EQUAL, len(indices) - place, 0, index) for place, index in enumerate(indices)),
        (_RETURN, 0, 0, _NO_BYTES),
        (_RETURN, 0, 0, _ALL_BYTES),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    # A `struct sock_fprog`, which points to the code.
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    try:
        own.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError as error:
        if interface == _LOOPBACK and _bind_to_loopback(own):
            return
        raise ConfigError(
            f"cluster.bind={interface}: the system does not permit filters on sockets ({error.strerror}); some permit "
            "them to root only, or with the capability CAP_NET_ADMIN"
        ) from None


def _bind_to_loopback(own: socket.socket) -> bool:
    """Binds a socket to the loopback device, which Linux 5.7 and later permit once without privileges."""
    name = _LOOPBACK.encode()
    with suppress(OSError):
        if own.getsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, 16).rstrip(b"\0") != name:
            own.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, name)
        return True
    return False


def bind_port(port: int) -> None:
    """Binds all sockets of this process at a port that TensorFlow has opened; raises `ClusterError` without one."""
    interface = _interface
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


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """The TCP sockets of this process, whoever opened them, each with its inode; copies, which the caller closes.

    None on systems other than Linux, which do not list them.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            # Only sockets: closing a copy of a file's descriptor releases this process's locks on the file.
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            # It may be closed, and its number reused, at any moment: only the copy is examined.
            copy = os.dup(int(name))
            status = os.fstat(copy)
            # With this type Python leaves it blocking, or not, as it is; see socket.setdefaulttimeout.
            found = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
            is_stream = found.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
            if stat.S_ISSOCK(status.st_mode) and is_stream and found.family in (socket.AF_INET, socket.AF_INET6):
                yield status.st_ino, found
            else:
                found.close()


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Yields different TCP ports that are free, and that the system gives to nobody else inside the block.

    Otherwise any connection may get a port after it was found to be free and before a task serves there. On Linux a
    socket that is bound and does not listen keeps the port, and still lets every process serve there that sets
    SO_REUSEADDR, as TensorFlow does. Other systems do not permit both: there the ports are not kept.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("", 0))
        numbers = [each.getsockname()[1] for each in sockets]
        if sys.platform != "linux":
            held.close()
        yield numbers
