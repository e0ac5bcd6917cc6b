"""Starts several server tasks for the price of one: a process imports TensorFlow once, then forks each of them.

`python -m kdist.cluster.forkserver '<file descriptors as JSON>'`, after the fork server of Python's multiprocessing. It
ends when its tasks have, or with its parent; its tasks end with it. The chief's side is `ForkServer`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NoReturn

from kdist.cluster.process import KILLED_SECS, end_with_parent
from kdist.cluster.server import ServerOptions, serve

_REPORT_SECS = 0.05
_CLOSE_SECS = 2.0


@dataclass(frozen=True)
class _Order:
    """One task to fork.

    Attributes:
        options: `ServerOptions` as JSON.
        environment: variables of its own.
        log: path of its standard error.
    """

    options: str
    environment: dict[str, str]
    log: str


@dataclass(frozen=True)
class _Pipes:
    """File descriptors of a task's standard input and output."""

    stdin: int
    stdout: int


class ForkedTask:
    """A task as the chief sees it: what kdist needs of `subprocess.Popen`, which knows its own children only.

    Attributes:
        stdin: the task ends when this is closed.
        stdout: what the task writes to its standard output.
        returncode: as that of `Popen`; None while the task runs.
    """

    def __init__(self, server: ForkServer, stdin: int, stdout: int) -> None:
        self._server = server
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)
        self.returncode: int | None = None
        self.forked_pid: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; that of the fork server before it is forked."""
        self._server.update(0.0)
        return self._server.process.pid if self.forked_pid is None else self.forked_pid

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        self._server.update(0.0)
        return self.returncode

    def wait(self, timeout: float = KILLED_SECS) -> int:
        """Waits until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("a task", timeout)
            self._server.update(min(left, _REPORT_SECS))
        return code

    def kill(self) -> None:
        """Kills it; before it is forked, the fork server."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, 9)


class ForkServer:
    """The chief's side: starts the process, and hears from it which task has which id and how it ended.

    Args:
        num_tasks: how many tasks it will fork.
        environment: that of the process.
        log: takes what it has to say before it forks.

    Attributes:
        tasks: the tasks; they run when `fork` was called.
    """

    def __init__(self, num_tasks: int, environment: dict[str, str], log: Path) -> None:
        self.environment = environment
        self.tasks: list[ForkedTask] = []
        pipes, theirs = [], []
        for _ in range(num_tasks):
            child_in, our_in = os.pipe()
            our_out, child_out = os.pipe()
            theirs += [child_in, child_out]
            pipes.append(_Pipes(child_in, child_out))
            self.tasks.append(ForkedTask(self, our_in, our_out))
        take_orders, give_orders = os.pipe()
        self._orders: IO[bytes] = os.fdopen(give_orders, "wb")
        self._reports, report_to = os.pipe()
        theirs += [take_orders, report_to]
        # Several threads ask whether a task lives; a closed descriptor may be a socket of TensorFlow's a moment later.
        self._lock = threading.Lock()
        self._unread = b""
        arguments = json.dumps(
            {"take_orders": take_orders, "report_to": report_to, "pipes": [asdict(pair) for pair in pipes]}
        )
        with log.open("ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kdist.cluster.forkserver", arguments],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                pass_fds=theirs,
                # Ctrl-C goes to the chief alone: it saves first, then ends its tasks.
                start_new_session=True,
            )
        for descriptor in theirs:
            os.close(descriptor)

    def fork(self, tasks: Sequence[tuple[ServerOptions, dict[str, str], Path]]) -> None:
        """Has the tasks forked, once.

        Args:
            tasks: for each its options, variables of its own environment, and its log file.
        """
        orders = [asdict(_Order(options.to_json(), own, str(log))) for options, own, log in tasks]
        # If the process has ended, waiting for its tasks will tell.
        with suppress(BrokenPipeError), self._orders:
            self._orders.write(json.dumps(orders).encode() + b"\n")

    def update(self, timeout: float) -> None:
        """Reads what was reported, waiting at most `timeout` seconds for more."""
        with self._lock:
            while self._reports >= 0 and self._can_read(timeout):
                self._take(os.read(self._reports, 1 << 16))
                timeout = 0.0

    def _can_read(self, timeout: float) -> bool:
        # Not select(): its descriptors end at 1024.
        poll = select.poll()
        poll.register(self._reports, select.POLLIN)
        return bool(poll.poll(1000 * timeout))

    def _take(self, received: bytes) -> None:
        if not received:
            self._has_ended()
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            what, index, number = line.decode().split()
            task = self.tasks[int(index)]
            if what == "pid":
                task.forked_pid = int(number)
            else:
                task.returncode = int(number)

    def close(self) -> None:
        """Lets the process end, and waits for it a moment."""
        for task in self.tasks:
            task.stdin.close()
            task.stdout.close()
        self._orders.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(_CLOSE_SECS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(KILLED_SECS)
        self.update(0.0)

    def _has_ended(self) -> None:
        """Without its report nobody knows how a task ended, but it has: tasks end with the process."""
        os.close(self._reports)
        self._reports = -1
        code = self.process.wait(KILLED_SECS)
        for task in self.tasks:
            if task.returncode is None:
                task.returncode = code or -9


def _fork(order: _Order, pipes: _Pipes, not_its_own: Sequence[int]) -> int:
    """Forks a task; returns its process id.

    Args:
        not_its_own: open file descriptors that the task must not have.
    """
    pid = os.fork()
    if pid:
        os.close(pipes.stdin)
        os.close(pipes.stdout)
        return pid
    os.setsid()
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((pipes.stdin, 0), (pipes.stdout, 1), (log, 2)):
        os.dup2(source, target)
        os.close(source)
    for descriptor in not_its_own:
        os.close(descriptor)
    os.environ.update(order.environment)
    serve(ServerOptions.from_json(order.options))


def main() -> NoReturn:
    end_with_parent()
    arguments = json.loads(sys.argv[1])
    pipes = [_Pipes(**pair) for pair in arguments["pipes"]]
    report_to = arguments["report_to"]
    # For all of them, once.
    import tensorflow  # noqa: F401

    with os.fdopen(arguments["take_orders"]) as take_orders:
        orders = [_Order(**order) for order in json.loads(take_orders.readline() or "[]")]
    index_of = {}
    for index, order in enumerate(orders):
        later = [descriptor for other in pipes[index + 1 :] for descriptor in (other.stdin, other.stdout)]
        pid = _fork(order, pipes[index], [report_to, *later])
        index_of[pid] = index
        os.write(report_to, f"pid {index} {pid}\n".encode())
    while index_of:
        pid, status = os.wait()
        index = index_of.pop(pid)
        os.write(report_to, f"ended {index} {os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
