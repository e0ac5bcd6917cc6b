"""Processes of tasks on this machine: forked from one that has imported TensorFlow, where the system allows that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdist.cluster.processes.child import Child, start_child, task_environment
from kdist.cluster.processes.forkserver import SERVING, TRAINING, ForkServer, TaskProgram
from kdist.cluster.spec import Task

#: The fork server of all processes inside the block of `fork_server`; at most one.
_fork_servers: list[ForkServer] = []


@contextmanager
def fork_server(log: Path, *, train: bool = False) -> Iterator[None]:
    """Starts the fork server of the processes that are started inside the block.

    It imports TensorFlow while this process does so as well, and only once for clusters that follow each other.

    Args:
        log: gets its output.
        train: whether processes run a training loop, or only serve TensorFlow.
    """
    if sys.platform != "linux" or _fork_servers:
        yield
        return
    _fork_servers.append(_new_fork_server(log, train=train))
    try:
        yield
    finally:
        _fork_servers.pop().close()


def _new_fork_server(log: Path, *, train: bool) -> ForkServer:
    return ForkServer(task_environment(Task("worker", 0)), log, TRAINING if train else SERVING)


class TaskProcesses:
    """Starts processes that end with this one; `close` ends their fork server.

    Args:
        log: gets the messages from before the first one is forked.
        train: as in `fork_server`.
    """

    def __init__(self, log: Path, *, train: bool = False) -> None:
        self._log = log
        self._train = train
        self._fork_server: ForkServer | None = None

    def start(self, program: TaskProgram, start_timeout: float) -> Child:
        """Starts a process that runs a program; returns at once."""
        # On other systems, a process that has imported TensorFlow may not survive a fork.
        if sys.platform == "linux":
            return Child(lambda: self._forks().fork(program), program.log, start_timeout)
        return start_child(
            [sys.executable, "-m", program.module, program.options],
            program.log,
            prints_to_log=program.prints_to_log,
            start_timeout=start_timeout,
            stdout=subprocess.PIPE,
            env=program.environment,
            pass_fds=program.pass_fds,
        )

    def close(self) -> None:
        """Ends the fork server, and with it all processes that are left, unless a `fork_server` block has started it.

        More can be started afterwards.
        """
        if self._fork_server is not None and self._fork_server not in _fork_servers:
            self._fork_server.close()
        self._fork_server = None

    def _forks(self) -> ForkServer:
        if self._fork_server is None:
            living = [server for server in _fork_servers if server.is_alive and server.can_train >= self._train]
            self._fork_server = living[0] if living else _new_fork_server(self._log, train=self._train)
        return self._fork_server
