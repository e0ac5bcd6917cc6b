"""Runs a command in a network namespace of its own, so that its bytes on the loopback device are its own.

`python -m benchmarks.isolated COMMAND...` inside `unshare --net`: brings the loopback device up, then is the command.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

# linux/sockios.h and linux/if.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def prefix() -> list[str]:
    """The beginning of a command that runs isolated; empty where the system permits no namespaces."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0:
        return [*unshare, sys.executable, "-m", "benchmarks.isolated"]
    return []


def bytes_received(pid: int) -> int:
    """Bytes that the loopback device of a process's namespace has received: each byte that was sent, once."""
    with open(f"/proc/{pid}/net/dev") as lines:
        return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


if __name__ == "__main__":
    _bring_loopback_up()
    os.execvp(sys.argv[1], sys.argv[1:])
