"""Workers of an all-reduce that others start: one is lost between the meeting and the end of TensorFlow's own start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from helpers import environment, free_addresses

pytestmark = pytest.mark.cluster

_PROGRAM = """
import json, socket, sys
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.strategies import multi_worker_mirrored

addresses, own = json.loads(sys.argv[1]), int(sys.argv[2])
other = socket.create_server(("127.0.0.1", int(addresses[1 - own].rpartition(":")[2])))
meet = multi_worker_mirrored.meet

def meet_and_lose(*args):
    meet(*args)
    other.close()

multi_worker_mirrored.meet = meet_and_lose
multi_worker_mirrored.join(Membership(ClusterSpec((), tuple(addresses)), Task("worker", own)), 3.0)
"""


@pytest.mark.parametrize("own", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_worker_does_not_wait_for_one_that_was_lost_after_they_had_met(own: int) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(free_addresses(2)), str(own)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert time.monotonic() - began < 40
    assert (
        "kdist: error: the other workers did not join within 3 s (cluster.start_timeout); killed, as TensorFlow keeps "
        "waiting\n"
    ) in done.stderr
