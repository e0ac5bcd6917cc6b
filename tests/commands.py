"""`python -m kdist` in processes that begin with TensorFlow imported, which costs more than most of what tests run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from helpers import environment

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
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        stdout: Path,
        stderr: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        variables = dict(environment() if env is None else env)
        # The test that started it may end before it does.
        self._process = _FORKS.Process(target=_run, args=(arguments, cwd, stdout, stderr, variables), daemon=True)
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
    arguments: tuple[str, ...], cwd: Path, stdout: Path, stderr: Path | None, variables: Mapping[str, str]
) -> None:
    """The command, in a process that was forked for it."""
    os.chdir(cwd)
    # What importing has set stays.
    os.environ.update(variables)
    for descriptor, path in ((1, stdout), (2, stderr or stdout)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["kdist", *arguments]
    from kdist.cli import main

    main()
