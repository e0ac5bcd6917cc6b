"""The TCP sockets of this process, whoever opened them: TensorFlow has no options for its own."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """The TCP sockets of this process, each with its inode; copies, which the caller closes."""
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
