"""Kills its parent when time is up, and says why: `python -m kdist.cluster.processes.hard_limit <seconds> <text>`.

Some calls of TensorFlow wait for other tasks without a limit that could be set, and hold Python's lock meanwhile: no
thread of that process can run, and no handler of a signal. This process is for them; see `killed_after`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from kdist.cluster.processes.child import end_with_parent


def main(secs: float, text: str) -> None:
    """Kills the parent after `secs` seconds, unless it has closed standard input or exited by then."""
    parent = os.getppid()
    end_with_parent()
    time.sleep(secs)
    if os.getppid() == parent:
        os.write(2, f"kdist: error: {text}\n".encode())
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
