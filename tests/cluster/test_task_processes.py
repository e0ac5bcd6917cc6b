"""A process that is forked for a task is as one that was started for it."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import environment

from kdist.cluster.processes.forkserver import ForkServer, TaskProgram

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
