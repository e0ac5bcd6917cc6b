"""Starts several server tasks for the price of one: a process imports TensorFlow once, then forks each of them.

`python -m kdist.cluster.forkserver '<tasks as JSON>'`, after the fork server of Python's multiprocessing. It ends when
its tasks have, or with its parent; its tasks end with it. The chief's side is `ForkServer`.
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
class _Child:
    """One task to fork.

    Attributes:
        options: `ServerOptions` as JSON.
        environment: variables of its own.
        stdin, stdout: file descriptors of its standard input and output.
        log: path of its standard error.
    """

    options: str
    environment: dict[str, str]
    stdin: int
    stdout: int
    log: str


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
        tasks: for each task its options, variables of its own environment, and its log file.
        environment: that of the process.
    """

    def __init__(
        self, tasks: Sequence[tuple[ServerOptions, dict[str, str], Path]], environment: dict[str, str]
    ) -> None:
        self.tasks: list[ForkedTask] = []
        children, theirs = [], []
        for options, own_environment, log in tasks:
            child_in, our_in = os.pipe()
            our_out, child_out = os.pipe()
            theirs += [child_in, child_out]
            children.append(_Child(options.to_json(), own_environment, child_in, child_out, str(log)))
            self.tasks.append(ForkedTask(self, our_in, our_out))
        self._reports, report_to = os.pipe()
        # Several threads ask whether a task lives; a closed descriptor may be a socket of TensorFlow's a moment later.
        self._lock = threading.Lock()
        self._unread = b""
        arguments = json.dumps({"report_to": report_to, "children": [asdict(child) for child in children]})
        # What happens before the first task is forked is in its log.
        with tasks[0][2].open("ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kdist.cluster.forkserver", arguments],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                pass_fds=[*theirs, report_to],
                # Ctrl-C goes to the chief alone: it saves first, then ends its tasks.
                start_new_session=True,
            )
        for descriptor in [*theirs, report_to]:
            os.close(descriptor)

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


def _fork(child: _Child, not_its_own: Sequence[int]) -> int:
    """Forks a task; returns its process id.

    Args:
        not_its_own: open file descriptors that the task must not have.
    """
    pid = os.fork()
    if pid:
        os.close(child.stdin)
        os.close(child.stdout)
        return pid
    os.setsid()
    log = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((child.stdin, 0), (child.stdout, 1), (log, 2)):
        os.dup2(source, target)
        os.close(source)
    for descriptor in not_its_own:
        os.close(descriptor)
    os.environ.update(child.environment)
    serve(ServerOptions.from_json(child.options))


def main() -> NoReturn:
    end_with_parent()
    arguments = json.loads(sys.argv[1])
    children = [_Child(**child) for child in arguments["children"]]
    report_to = arguments["report_to"]
    # For all of them, once.
    import tensorflow  # noqa: F401

    index_of = {}
    for index, child in enumerate(children):
        later = [descriptor for other in children[index + 1 :] for descriptor in (other.stdin, other.stdout)]
        pid = _fork(child, [report_to, *later])
        index_of[pid] = index
        os.write(report_to, f"pid {index} {pid}\n".encode())
    while index_of:
        pid, status = os.wait()
        index = index_of.pop(pid)
        os.write(report_to, f"ended {index} {os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
