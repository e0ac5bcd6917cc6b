"""`python -m kdist` in processes that begin with TensorFlow imported, which costs more than most of what tests run.

So do the tasks of local clusters. Drills, and a few other tests, start everything as users do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from helpers import environment

from kdist import forks
from kdist.cluster.processes import forkserver
from kdist.cluster.processes.child import Child, start_child

# They are forked, as Python's multiprocessing does it, from a process that has imported this and nothing else.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["kdist.trainer", "hydra.main"])


class Command:
    """A command that runs in the background; what it needs of `subprocess.Popen` under the same names.

    Args:
        arguments: those of `python -m kdist`.
        cwd: the folder that it runs in.
        stdout: the file that takes what it prints.
        stderr: the file that takes what it says on standard error; `stdout` if None.
        env: its environment; what TensorFlow reads when it is imported was read before.
        host: a process whose network, host name and mounts it has, as if on another machine.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        stdout: Path,
        stderr: Path | None = None,
        env: Mapping[str, str] | None = None,
        host: int | None = None,
    ) -> None:
        variables = dict(environment() if env is None else env)
        # The test that started it may end before it does.
        self._process = _FORKS.Process(target=_run, args=(arguments, cwd, stdout, stderr, variables, host), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("kdist", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def kdist(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs `python -m kdist` to its end, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        command = Command(*arguments, cwd=cwd, stdout=stdout, stderr=stderr)
        try:
            code = command.wait(timeout)
        finally:
            command.kill()
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def _run(
    arguments: tuple[str, ...],
    cwd: Path,
    stdout: Path,
    stderr: Path | None,
    variables: Mapping[str, str],
    host: int | None,
) -> None:
    """The command, in a process that was forked for it."""
    if host is not None:
        _enter(host)
    os.chdir(cwd)
    # What importing has set stays.
    os.environ.update(variables)
    for descriptor, path in ((1, stdout), (2, stderr or stdout)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["kdist", *arguments]
    forkserver.start_child = _start_fork_server
    from kdist.cli.main import main

    main()


def _enter(pid: int) -> None:
    """Takes this process, which has one thread, to the network, host name and mounts of another one."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to {name}")


def _start_fork_server(
    command: Sequence[str], log: Path, *, prints_to_log: bool, env: Mapping[str, str], pass_fds: Sequence[int]
) -> Child:
    """Forks the command itself, as long as TensorFlow is imported there and has not run anything."""
    from tensorflow.python.eager import context

    if context.context_safe() is not None:
        return start_child(command, log, prints_to_log=prints_to_log, env=env, pass_fds=pass_fds)
    (orders,) = pass_fds

    def become() -> NoReturn:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["forkserver", *command[3:]]
        forkserver.main()

    def start() -> _Fork:
        with log.open("ab") as log_file, forks.hold_back_signals():
            return _Fork(become, log_file, keep=orders)

    child = Child(start, log)
    forks.keep_from_children(child.stdin)
    return child


class _Fork:
    """A fork of this process, for a `Child`.

    Args:
        become: what it does; never returns.
        log: takes its output.
        keep: the descriptor that it has beside the standard ones.
    """

    def __init__(self, become: Callable[[], NoReturn], log: IO[bytes], keep: int) -> None:
        standard_input, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        self.stdout = None
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                for target, descriptor in enumerate((standard_input, log.fileno(), log.fileno())):
                    os.dup2(descriptor, target)
                sys.stdout, sys.stderr = (
                    os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2)
                )
                # Whoever waits for the end of the command, or for its lock, must not wait for this.
                os.closerange(3, keep)
                os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
                become()
            except BaseException:  # noqa: BLE001 - the frames above are the command's
                traceback.print_exc()
            os._exit(1)
        os.close(standard_input)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork server", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
