"""Kills processes where no thread of the chief can run: TensorFlow waits, and holds Python's lock meanwhile.

`python -S watchdog.py <seconds>` is for tasks of this machine that were stopped (SIGSTOP) and do not continue:
TensorFlow sends a new function to every task, and waits for a stopped one without a limit. It reads process ids from
its standard input, one per line, and writes the ids of killed processes to its standard output.

It exits when its input closes, and imports nothing that is slow to import.
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


def stopped_longer_than(secs: float, pids: Collection[int], since: dict[int, float]) -> list[int]:
    """The `pids` stopped for more than `secs` seconds without a break; to call often, with the same `since`."""
    now = time.monotonic()
    # A process that is merely slowed down is seen running now and then.
    found = {pid: since.get(pid, now) for pid in pids if state_of(pid) == "T"}
    since.clear()
    since.update(found)
    return [pid for pid, began in found.items() if now - began > secs]


def kill_stopped(limit_secs: float) -> None:
    since: dict[int, float] = {}
    pids: set[int] = set()
    while True:
        if select.select([0], [], [], _CHECK_SECS)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                return
            pids.update(int(line) for line in received.split())
        pids = {pid for pid in pids if state_of(pid) is not None}
        for pid in stopped_longer_than(limit_secs, pids, since):
            # Reported first: the chief that finds the process dead also finds the reason.
            os.write(1, f"{pid}\n".encode())
            os.kill(pid, signal.SIGKILL)
            pids.discard(pid)


def _end_with_parent() -> None:
    """Stands for `kdist.cluster.processes.child.end_with_parent`, which would take long to import."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)


def state_of(pid: int) -> str | None:
    """The state of a process, `T` if it is stopped; None if it has exited."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return None if state == "Z" else state


if __name__ == "__main__":
    _end_with_parent()
    kill_stopped(float(sys.argv[1]))
