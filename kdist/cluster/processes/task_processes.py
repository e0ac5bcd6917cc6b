"""Processes of tasks on this machine: forked from one that has imported TensorFlow, where the system allows that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kdist.cluster.processes.child import Child, start_child, task_environment
from kdist.cluster.processes.forkserver import SERVING, TRAINING, ForkServer, TaskProgram
from kdist.cluster.spec import Task

#: Fork servers of the blocks of `share_fork_server` that this process is in.
_shared: list[ForkServer] = []


@contextmanager
def share_fork_server(log: Path, *, train: bool = False) -> Iterator[None]:
    """Starts a fork server that the blocks of `fork_server` inside this one use.

    It imports TensorFlow while this process does so as well, and only once for clusters that follow each other.
    """
    with fork_server(log, train=train) as server, ExitStack() as at_end:
        if server is not None:
            _shared.append(server)
            at_end.callback(_shared.remove, server)
        yield


@contextmanager
def fork_server(log: Path, *, train: bool = False) -> Iterator[ForkServer | None]:
    """The fork server of a block: a shared one that lives, or a new one, which ends with the block; see `start_task`.

    To `train`, processes run a training loop; otherwise they only serve TensorFlow. A new one prints to `log`.
    """
    if sys.platform != "linux":
        # A process that has imported TensorFlow may not survive a fork.
        yield None
        return
    if living := [server for server in _shared if server.is_alive and server.can_train >= train]:
        yield living[0]
        return
    server = ForkServer(task_environment(Task("worker", 0)), log, TRAINING if train else SERVING)
    try:
        yield server
    finally:
        server.close()


def start_task(server: ForkServer | None, program: TaskProgram, start_timeout: float) -> Child:
    """Starts a process that runs a program, as a fork of `server` if that is not None; returns at once."""
    if server is not None:
        return Child(lambda: server.fork(program), program.log, start_timeout)
    return start_child(
        [sys.executable, "-m", program.module, program.options],
        program.log,
        prints_to_log=program.prints_to_log,
        start_timeout=start_timeout,
        stdout=subprocess.PIPE,
        env=program.environment,
        pass_fds=program.pass_fds,
    )
