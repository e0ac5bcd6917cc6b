"""Kills tasks of this machine that were stopped (SIGSTOP) and do not continue. `python sigstop_watchdog.py <seconds>`

The chief watches its tasks itself. But TensorFlow sends a new function to every task while it holds Python's lock, and
waits for a stopped one without a limit; then no thread of the chief can run. This process is for that case. It reads
process ids from its standard input, one per line, writes those that it kills to its standard output, and exits when its
input closes. It imports nothing that is slow to import.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Collection

_CHECK_SECS = 0.1
# linux/prctl.h
_PR_SET_PDEATHSIG = 1


class Stopped:
    """Tracks how long processes of this machine have been stopped without a break; has to be called often."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def longer_than(self, secs: float, pids: Collection[int]) -> list[int]:
        """Those of `pids` that have been stopped for more than `secs` seconds."""
        now = time.monotonic()
        # A process that is merely slowed down is seen running now and then.
        self._since = {pid: self._since.get(pid, now) for pid in pids if _state(pid) == "T"}
        return [pid for pid, since in self._since.items() if now - since > secs]


def guard(limit_secs: float) -> None:
    """Kills a process when it has been stopped for that long without a break."""
    # As every child of the chief: see `end_with_parent`, which would take long to import.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    stopped = Stopped()
    pids: set[int] = set()
    while True:
        if select.select([0], [], [], _CHECK_SECS)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                return
            pids.update(int(line) for line in received.split())
        pids = {pid for pid in pids if _state(pid) is not None}
        for pid in stopped.longer_than(limit_secs, pids):
            # Reported first: the chief that finds the process dead also finds the reason.
            os.write(1, f"{pid}\n".encode())
            os.kill(pid, signal.SIGKILL)
            pids.discard(pid)


def _state(pid: int) -> str | None:
    """`T` for a stopped process; None for one that has exited."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return None if state == "Z" else state


if __name__ == "__main__":
    guard(float(sys.argv[1]))
