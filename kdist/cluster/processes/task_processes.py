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

#: The fork server of all processes inside `prepared`; at most one.
_prepared: list[ForkServer] = []


@contextmanager
def prepared(log: Path, *, train: bool = False) -> Iterator[None]:
    """Starts the fork server of the processes that are started inside the block.

    It imports TensorFlow while this process does so as well, and only once for clusters that follow each other.

    Args:
        log: gets its output.
        train: whether processes are to run a training loop, or only to serve TensorFlow.
    """
    if sys.platform != "linux" or _prepared:
        yield
        return
    _prepared.append(_new_fork_server(log, train=train))
    try:
        yield
    finally:
        _prepared.pop().close()


def _new_fork_server(log: Path, *, train: bool) -> ForkServer:
    return ForkServer(task_environment(Task("worker", 0)), log, TRAINING if train else SERVING)


class TaskProcesses:
    """Starts processes that end with this one; `close` ends what they were forked from.

    Args:
        log: gets the messages from before the first one is forked.
        train: as in `prepared`.
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
        """Ends what the processes were forked from, and with it those that are left, unless `prepared` has started it.

        More can be started afterwards.
        """
        if self._fork_server is not None and self._fork_server not in _prepared:
            self._fork_server.close()
        self._fork_server = None

    def _forks(self) -> ForkServer:
        if self._fork_server is None:
            living = [server for server in _prepared if server.is_alive and server.can_train >= self._train]
            self._fork_server = living[0] if living else _new_fork_server(self._log, train=self._train)
        return self._fork_server
