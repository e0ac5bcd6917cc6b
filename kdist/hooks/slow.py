"""Slows a process down: stops it most of the time, until standard input closes. `python slow.py <pid> <factor>`"""

import os
import select
import signal
import sys

_SLICE_SECS = 0.02


def slow_down(pid: int, factor: float) -> None:
    """Lets `pid` run for one time slice in `factor`, and at full speed again at the end."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            is_over = bool(select.select([0], [], [], (factor - 1) * _SLICE_SECS)[0])
            os.kill(pid, signal.SIGCONT)
            if is_over or select.select([0], [], [], _SLICE_SECS)[0]:
                return
    except ProcessLookupError:
        # It has exited; the process that replaces it runs at full speed.
        return


if __name__ == "__main__":
    slow_down(int(sys.argv[1]), float(sys.argv[2]))
