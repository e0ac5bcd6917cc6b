"""Starts tasks at the cost of one, where the system allows that: a process imports TensorFlow once, and forks each.

`python -m kdist.cluster.processes.forkserver <file descriptor of a socket> <module>`, after the fork server of Python's
multiprocessing; the module is imported as well. It exits when its socket closes, or with its parent; its tasks exit
with it. The chief's side is `fork_server` and `start_task`.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, NoReturn

from kdist import forks, log
from kdist._compat.imports import quick_import
from kdist.cluster.processes import watchdog
from kdist.cluster.processes.child import (
    NOT_STARTED,
    Child,
    end_children,
    end_with_parent,
    how_it_ended,
    pipe_of_signals,
    start_child,
    task_environment,
)
from kdist.cluster.spec import Task
from kdist.log import warn

#: The name of the process.
NAME = "kdist-forks"
#: Modules that it imports: for tasks that serve TensorFlow, and for tasks that run a training loop.
SERVING, TRAINING = "kdist.data.python_readers", "kdist.strategies.remote"

_REPORT_SECS = 0.05
_LOOK_SECS = 1.0
_CLOSE_SECS = 2.0
_SEND_SECS = 60.0
_MAX_MESSAGE = 1 << 16
_MAX_DESCRIPTORS = 8

#: Fork servers of the blocks of `share_fork_server` that this process is in.
_shared: list[ForkServer] = []


@dataclass(frozen=True)
class TaskProgram:
    """The program of a task, which runs `module.run(options, descriptors)`.

    Attributes:
        environment: the variables of the task; some that TensorFlow reads on import may have no effect.
        log: gets its standard error, at the end.
        prints_to_log: whether its standard output goes there, too; otherwise, `stdout` of the process has it.
        pass_fds: open files that it gets; `descriptors` has their numbers there, by those here.
    """

    module: str
    options: str
    environment: Mapping[str, str]
    log: Path
    prints_to_log: bool = False
    pass_fds: Sequence[int] = ()


class ForkedTask:
    """A task as the chief sees it, for a `Child`; `subprocess.Popen` handles children of its own process only.

    It exits when its `stdin` is closed. `returncode` is None while it runs, `forked_pid` before it is forked.
    """

    def __init__(self, server: ForkServer, stdin: int, stdout: int) -> None:
        self._server = server
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb", buffering=0)
        forks.keep_from_children(self.stdin)
        self.stdout: IO[bytes] | None = os.fdopen(stdout, "rb", buffering=0)
        self.returncode: int | None = None
        self.forked_pid: int | None = None

    @property
    def pid(self) -> int:
        """Its process id; before it is forked, the fork server's."""
        self._server.update(0.0)
        return self._server.process.pid if self.forked_pid is None else self.forked_pid

    def poll(self) -> int | None:
        self._server.update(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._server.update(min(left, _REPORT_SECS))
        return code

    def kill(self) -> None:
        """Kills it; before it is forked, the fork server."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The chief's side: starts the process, which imports a module, lets it fork tasks, and reads its reports."""

    def __init__(self, environment: Mapping[str, str], log: Path, module: str = SERVING) -> None:
        self._environment = dict(environment)
        #: True if the modules of a training loop are imported.
        self.can_train = module == TRAINING
        self._numbers = itertools.count()
        #: The tasks whose end was not reported yet, by number.
        self._tasks: dict[int, ForkedTask] = {}
        # It keeps messages apart, and carries file descriptors.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks.keep_from_children(self._socket)
        # A stopped process accepts no orders; whatever waits for its task finds that it does not serve.
        self._socket.settimeout(_SEND_SECS)
        # Several threads ask whether a task is alive.
        self._lock = threading.Lock()
        self._next_look = 0.0
        with theirs:
            orders = theirs.fileno()
            command = [sys.executable, "-m", "kdist.cluster.processes.forkserver", str(orders), module]
            self.process = start_child(command, log, prints_to_log=True, env=self._environment, pass_fds=[orders])

    @property
    def is_alive(self) -> bool:
        self.update(0.0)
        return self._socket.fileno() >= 0

    def fork(self, program: TaskProgram) -> ForkedTask:
        """Orders a task, which is forked as soon as TensorFlow is imported; returns at once."""
        common, environment = self._environment, program.environment
        own: dict[str, str | None] = {name: value for name, value in environment.items() if common.get(name) != value}
        # Variables of the fork server that the task has not.
        own |= dict.fromkeys(common.keys() - environment.keys())
        self.update(0.0)
        number, folder = next(self._numbers), None
        # It may have been deleted.
        with suppress(FileNotFoundError):
            folder = os.getcwd()
        order = [number, program.module, program.options, own, folder, program.pass_fds]
        child_in, our_in = os.pipe()
        our_out, child_out = os.pipe()
        task = ForkedTask(self, our_in, our_out)
        with self._lock, program.log.open("ab") as log_file:
            self._tasks[number] = task
            # If the process has exited, waiting for its tasks will show it.
            with suppress(OSError):
                output = log_file.fileno() if program.prints_to_log else child_out
                descriptors = [child_in, output, log_file.fileno(), *program.pass_fds]
                socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
        os.close(child_in)
        os.close(child_out)
        return task

    def update(self, timeout: float) -> None:
        """Reads the reports, waiting at most `timeout` seconds for more."""
        with self._lock:
            self._continue_if_stopped()
            while self._socket.fileno() >= 0 and connection.wait([self._socket], timeout):
                report = b""
                with suppress(ConnectionResetError):  # It ended with orders unread.
                    report = self._socket.recv(_MAX_MESSAGE)
                if not report:
                    self._socket.close()
                    if (code := self.process.wait()) < 0:
                        warn(f"the fork server of tasks ({NAME}) died ({how_it_ended(code)}), and its tasks with it")
                    break
                what, number, value = report.decode().split()
                if what == "pid":
                    self._tasks[int(number)].forked_pid = int(value)
                else:
                    self._tasks.pop(int(number)).returncode = int(value)
                timeout = 0.0
            if self._tasks and self._socket.fileno() < 0:
                # Without a report the exit code of a task is not known, but it has exited: tasks exit with the process.
                code = self.process.wait()
                for task in self._tasks.values():
                    task.returncode = code or -9
                self._tasks.clear()

    def _continue_if_stopped(self) -> None:
        """Lets the process continue if it was stopped (SIGSTOP): without it, nobody hears that a task has ended."""
        if time.monotonic() < self._next_look or self._socket.fileno() < 0:
            return
        self._next_look = time.monotonic() + _LOOK_SECS
        if watchdog.state_of(self.process.pid) == "T":
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            warn(f"the fork server of tasks ({NAME}, process {self.process.pid}) was stopped; it continues")

    def close(self) -> None:
        """Stops the process, and with it the remaining tasks."""
        self.update(0.0)
        with self._lock:
            self._socket.close()
        end_children([self.process], _CLOSE_SECS)
        self.update(0.0)


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
    with closing(ForkServer(task_environment(Task("worker", 0)), log, TRAINING if train else SERVING)) as server:
        yield server


def start_task(server: ForkServer | None, program: TaskProgram, start_timeout: float) -> Child:
    """Starts a process that runs a program, as a fork of `server` if that lives and is not None; returns at once."""
    if server is not None and server.is_alive:
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


class _Forks:
    """The process: forks tasks on order, and reports how its children end."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._numbers: dict[int, int] = {}
        # A child that exits wakes the loop.
        self._woken = pipe_of_signals()

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready = connection.wait([self._orders, self._woken])
            if self._woken in ready:
                os.read(self._woken, _MAX_MESSAGE)
                self._report_ended()
            if self._orders in ready:
                message, descriptors, _, _ = socket.recv_fds(self._orders, _MAX_MESSAGE, _MAX_DESCRIPTORS)
                if not message:
                    return
                self._fork(json.loads(message), descriptors)

    def _fork(self, order: Sequence[Any], descriptors: Sequence[int]) -> None:
        try:
            with forks.hold_back_signals():
                pid = os.fork()
                if not pid:
                    self._become(order, descriptors)
            self._numbers[pid] = order[0]
        except OSError as error:
            # The other tasks go on.
            with suppress(OSError):
                os.write(descriptors[2], f"{log.now()} {NOT_STARTED}: {error.strerror}\n".encode())
            self._report("ended", order[0], 1)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(self, order: Sequence[Any], descriptors: Sequence[int]) -> NoReturn:
        """Runs the program of an order; `descriptors` are its standard input, output and error, and `pass_fds`."""
        number, module, options, environment, folder, pass_fds = order
        try:
            wake = signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            # From the task itself: the chief has it before it hears that the task is ready.
            self._report("pid", number, os.getpid())
            for target, descriptor in enumerate(descriptors[:3]):
                os.dup2(descriptor, target)
                os.close(descriptor)
            for own in (self._orders.detach(), self._woken, wake):
                os.close(own)
            for name, value in environment.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            if folder is not None:
                os.chdir(folder)
            # Otherwise all forks would draw the same numbers; Python's own generator sees to itself.
            import numpy as np

            np.random.seed()
            task = importlib.import_module(module)
            task.run(options, dict(zip(pass_fds, descriptors[3:], strict=True)))
        except BaseException:  # noqa: BLE001 - the frames above are the fork server's
            traceback.print_exc()
        os._exit(1)

    def _report_ended(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._report("ended", self._numbers.pop(pid), os.waitstatus_to_exitcode(status))

    def _report(self, what: str, number: int, value: int) -> None:
        # If the chief has closed the socket, the loop notices it next.
        with suppress(OSError):
            self._orders.send(f"{what} {number} {value}".encode())


def main() -> NoReturn:
    end_with_parent(NAME)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        # Once for all of them.
        with quick_import(keras=sys.argv[2] != SERVING):
            import tensorflow  # noqa: F401

            importlib.import_module(sys.argv[2])

        # Tasks share its memory until something writes there, as the garbage collector does when it visits an object.
        gc.freeze()
        _Forks(orders).run()
    os._exit(0)


if __name__ == "__main__":
    main()
