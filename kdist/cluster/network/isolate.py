"""A network namespace for a run on this machine: no other process reaches its servers, which listen on all interfaces.

Linux lets a process leave the system's network for a private one, with nothing but a loopback device, and its children
follow. A process with threads cannot do that, so the command line does it before it imports anything that starts
threads. See unshare(2), network_namespaces(7) and user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from kdist.cluster.network import sockets
from kdist.errors import ConfigError
from kdist.log import Line, warn

# linux/sched.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
# linux/sockios.h and linux/if.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_LOOPBACK = "lo"

_IN_PYTHON = "a Python process cannot do it by itself; start it by `unshare -rn python ...`, or use the command line"
_why_not = _IN_PYTHON if sys.platform == "linux" else "only Linux has private ones"
_has_entered = False
_has_warned = False
_has_told = False


def is_isolated() -> bool:
    """Tells whether this process has no network but the loopback device."""
    if sys.platform != "linux":
        return False
    return not any(_is_up(name) for _, name in socket.if_nameindex() if name != _LOOPBACK)


def enter(mode: str) -> None:
    """Moves this process, and its future children, to a private network namespace; `mode` is `cluster.isolate`.

    It does so on a machine without a network as well, where other processes share the loopback device. If it does not
    work, it raises `ConfigError` with `must`, and leaves it to `require` to say so with `auto`.
    """
    global _why_not, _has_entered  # noqa: PLW0603 - a process is in one namespace
    if mode == "never" or _has_entered:
        return
    if _why_not is _IN_PYTHON:
        # Once: the obstacle remains, and threads are added to it.
        try:
            _try_in_a_child()
            _unshare()
            _has_entered = True
            return
        except OSError as error:
            _why_not = str(error)
    if mode == "must":
        raise ConfigError(f"cluster.isolate=must: no private network namespace here: {_why_not}")


def require(mode: str) -> None:
    """Warns once if this process should be isolated and is not; raises `ConfigError` then with `must`."""
    global _has_warned  # noqa: PLW0603 - once a process
    if mode == "never":
        return
    if is_isolated():
        # `unshare -rn` leaves it down.
        if not _is_up(_LOOPBACK):
            _bring_loopback_up()
        return
    if mode == "must":
        raise ConfigError(f"cluster.isolate=must: this process is in the system's network namespace: {_why_not}")
    if not _has_warned:
        _has_warned = True
        warn(
            f"cluster.isolate=auto: not in a private network namespace: {_why_not}; "
            "whoever reaches this machine reaches TensorFlow's servers"
        )


def network_line() -> Line | None:
    """The line about the network of a run's servers at the interface of this process; None if it was printed."""
    global _has_told  # noqa: PLW0603 - once a process
    if _has_told:
        return None
    _has_told = True
    if is_isolated():
        known = "private namespace: only processes of this run reach its servers"
    elif (interface := sockets.bound_to()) == _LOOPBACK:
        known = "closed to other machines, not to other users here (cluster.bind)"
    else:
        known = (
            f"TensorFlow's servers listen on {f'{interface} and lo' if interface else 'all interfaces'}, without "
            "authentication or encryption: let only machines that you trust reach them"
        )
    return Line(f"network   {known}", "network")


def _try_in_a_child() -> None:
    """Tries it in a child process first: a process in which only a part of it works has no network and no way back."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("this process has threads already")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _unshare()
            code = 0
        except OSError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        why_not = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(why_not or "the system does not permit it")


def _unshare() -> None:
    """Enters a new namespace; without root privileges, inside a user namespace that grants them.

    The user id stays the same, so that files have the same owner inside and outside.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            raise OSError(f"unshare(2): {os.strerror(ctypes.get_errno())}")
        # Without this, Linux does not allow to write a map of groups.
        Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")
    _bring_loopback_up()


def _bring_loopback_up() -> None:
    _ask_kernel(_SIOCSIFFLAGS, struct.pack("16sh14x", _LOOPBACK.encode(), _flags(_LOOPBACK) | _IFF_UP))


def _is_up(interface: str) -> bool:
    try:
        return bool(_flags(interface) & _IFF_UP)
    except OSError:
        return False  # It was removed after it was listed.


def _flags(interface: str) -> int:
    return struct.unpack("16xH14x", _ask_kernel(_SIOCGIFFLAGS, struct.pack("16s16x", interface.encode())))[0]


def _ask_kernel(request: int, argument: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        return fcntl.ioctl(control, request, argument)
