"""A process that is forked for a task is as one that was started for it."""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers import environment

from kdist.cluster.processes.child import Child
from kdist.cluster.processes.forkserver import ForkServer, TaskProgram, start_task

pytestmark = pytest.mark.cluster

MODULE = """
import os, signal, time
import numpy as np

def run(options, descriptors):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    print(os.getcwd(), flush=True)
    os.write(descriptors[int(options)], np.random.bytes(8))
    time.sleep(60)
"""

#: A module of a fork server whose first fork fails.
NO_FORK = """
import errno, os
original = os.fork

def fail():
    os.fork = original
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = fail
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_task.py").write_text(MODULE)
    variables = environment()
    return {**variables, "PYTHONPATH": f"{variables['PYTHONPATH']}{os.pathsep}{tmp_path}"}


@pytest.fixture
def server(variables: dict[str, str], tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer(variables, tmp_path / "log")
    yield server
    server.close()


def test_it_has_open_files_random_numbers_and_the_folder(
    server: ForkServer, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial").mkdir()
    monkeypatch.chdir(tmp_path / "trial")
    pipes = [os.pipe() for _ in range(2)]
    logs = [tmp_path / f"task-{number}.log" for number in range(2)]
    tasks = [
        server.fork(TaskProgram("a_task", str(end), variables, log, prints_to_log=True, pass_fds=[end]))
        for (_, end), log in zip(pipes, logs, strict=True)
    ]
    # TensorFlow is still being imported.
    assert tasks[0].forked_pid is None
    first, second = (os.read(ours, 8) for ours, _ in pipes)
    assert first != second
    for task in tasks:
        os.kill(task.pid, signal.SIGTERM)
    assert [task.wait(10) for task in tasks] == [-signal.SIGTERM] * 2
    assert [log.read_text() for log in logs] == [f"{tmp_path}/trial\n"] * 2
    for descriptor in itertools.chain(*pipes):
        os.close(descriptor)


def one_task(server: ForkServer, variables: dict[str, str], log: Path) -> Child:
    """A task that has started."""
    reading, writing = os.pipe()
    task = start_task(
        server, TaskProgram("a_task", str(writing), variables, log, prints_to_log=True, pass_fds=[writing]), 60
    )
    os.close(writing)
    os.read(reading, 8)
    os.close(reading)
    return task


def test_the_end_of_a_task_is_seen_where_the_fork_server_was_stopped(
    server: ForkServer, variables: dict[str, str], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    task = one_task(server, variables, tmp_path / "task.log")
    os.kill(server.process.pid, signal.SIGSTOP)
    os.kill(task.pid, signal.SIGTERM)
    assert task.wait(10) == -signal.SIGTERM
    assert f"kdist-forks, process {server.process.pid}) was stopped; it continues" in str(recwarn.pop().message)
    assert one_task(server, variables, tmp_path / "task.log").poll() is None


def test_tasks_are_started_without_a_fork_server_that_was_killed(
    server: ForkServer, variables: dict[str, str], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    task = one_task(server, variables, tmp_path / "task.log")
    server.process.kill()
    assert task.wait(10) == -signal.SIGKILL
    assert "(kdist-forks) died (signal 9, SIGKILL), and its tasks with it" in str(recwarn.pop().message)
    assert start_task(server, TaskProgram("a_task", "0", variables, tmp_path / "log"), 60).pid != server.process.pid


def test_a_task_that_cannot_be_forked_is_one_lost_task(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "one_fork_fails.py").write_text(NO_FORK)
    log = tmp_path / "task.log"
    with closing(ForkServer(variables, tmp_path / "log", "one_fork_fails")) as server:
        task = start_task(server, TaskProgram("a_task", "0", variables, log), 60)
        assert task.wait(60) == 1
        assert "the process cannot be started: Resource temporarily unavailable" in task.log_tail()
        assert one_task(server, variables, log).poll() is None
