"""Kills its parent when time is up, and says why: `python hard_limit.py <seconds> <text>`.

Some calls of TensorFlow wait for other tasks without a limit that could be set, and hold Python's lock meanwhile: no
thread of that process can run, and no handler of a signal. This process is for them. It imports nothing that is slow to
import.
"""

import os
import select
import signal
import sys


def main(secs: float, text: str) -> None:
    """Returns when standard input closes; kills the parent if that has not happened after `secs` seconds."""
    # As every child: see `kdist.cluster.process.end_with_parent`.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    if not select.select([0], [], [], secs)[0] and os.getppid() == parent:
        os.write(2, f"kdist: error: {text}\n".encode())
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
