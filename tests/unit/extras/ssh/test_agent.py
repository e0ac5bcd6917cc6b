"""The agent in a process of its own, with pipes in the place of a connection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import as_on_macos, in_short, wait_until

from kdist.extras.ssh import agent

on_both = pytest.mark.parametrize("started", [None, as_on_macos()], ids=["here", "macOS"], indirect=True)


class Agent:
    def __init__(self, environment: dict[str, str] | None) -> None:
        # Isolated, it would ignore PYTHONPATH.
        options = ["-I"] if environment is None else []
        self.process = subprocess.Popen(
            [sys.executable, *options, agent.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def tell(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(message) + "\n").encode())
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith(agent.MARK), line
        return json.loads(line.removeprefix(agent.MARK))

    def prepare(self, folder: Path, number: int = 1, port: int | None = None, patience: float = 20) -> dict[str, Any]:
        self.tell(folder=str(folder), number=number, port=port, patience=patience)
        return self.answer()

    def start(self, **programs: str) -> None:
        tasks = [(name, [sys.executable, "-c", code], {"TASK": name}) for name, code in programs.items()]
        self.tell(tasks=tasks, environment={"SHARED": "all"})


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Agent]:
    process = Agent(getattr(request, "param", None))
    # An answer that never comes fails the test.
    deadline = threading.Timer(20, process.process.kill)
    deadline.start()
    yield process
    deadline.cancel()
    process.process.kill()
    process.process.wait(10)
    for pipe in (process.process.stdin, process.process.stdout):
        assert pipe is not None
        pipe.close()


def test_it_starts_tasks_in_the_folder_with_their_variables(started: Agent, tmp_path: Path) -> None:
    ports = started.prepare(tmp_path, 2)["ready"]
    assert len(set(ports)) == 2
    started.start(a="import os; print(os.getcwd(), os.environ['TASK'], os.environ['SHARED'])")
    assert started.answer() == {"task": "a", "stream": 1, "text": f"{tmp_path} a all"}
    assert started.answer() == {"task": "a", "code": 0}
    assert started.process.wait(10) == 0


def test_it_says_what_cannot_be(started: Agent, tmp_path: Path) -> None:
    assert started.prepare(tmp_path / "none") == {
        "refused": f"{tmp_path / 'none'}: No such file or directory (--workdir names another folder)"
    }


def test_ports_that_do_not_exist_are_named(started: Agent, tmp_path: Path) -> None:
    assert started.prepare(tmp_path, 2, 65535) == {"refused": "port 65536: the last one is 65535 (--port names others)"}


def test_a_launcher_that_falls_silent_before_the_start_is_not_waited_for(started: Agent, tmp_path: Path) -> None:
    started.prepare(tmp_path, patience=1)
    assert started.process.wait(10) == -signal.SIGALRM


# One attempt out of two finds an agent that misses some.
@pytest.mark.parametrize("attempt", in_short(range(6), range(2)))
def test_no_end_of_a_task_is_missed_when_signals_come_just_then(started: Agent, tmp_path: Path, attempt: int) -> None:
    names = [f"t{index}" for index in range(40)]
    started.prepare(tmp_path, len(names))
    started.tell(tasks=[(name, ["sleep", "60"], {}) for name in names], environment={})
    for _ in range(6):
        started.tell(signal=signal.SIGTERM)
        time.sleep(0.001)
    ended = [started.answer() for _ in names]
    assert sorted(answer["task"] for answer in ended) == sorted(names)
    assert {answer["code"] for answer in ended} == {-signal.SIGTERM}
    assert started.process.wait(10) == 0


@on_both
def test_signals_reach_tasks_and_their_codes_come_back(started: Agent, tmp_path: Path) -> None:
    started.prepare(tmp_path)
    started.start(
        a="import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7));"
        "print('up', flush=True); signal.pause()"
    )
    assert started.answer()["text"] == "up"
    started.tell()
    started.tell(signal=signal.SIGUSR1)
    assert started.answer() == {"task": "a", "code": 7}


@on_both
def test_what_a_task_leaves_running_ends_with_it(started: Agent, tmp_path: Path) -> None:
    started.prepare(tmp_path)
    started.start(
        a="import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid)"
    )
    child = int(started.answer()["text"])
    assert started.answer() == {"task": "a", "code": 0}
    wait_until(lambda: not _runs(child), 5, "it has ended")


@pytest.mark.parametrize("how", ["closed", "silent", "killed"])
def test_no_task_outlives_the_connection(started: Agent, tmp_path: Path, how: str) -> None:
    if how == "killed" and sys.platform != "linux":
        pytest.skip("only Linux ends children with their parent")
    started.prepare(tmp_path, patience=1.5 if how == "silent" else 20)
    # The task has a child, in the same session.
    started.start(
        a="import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(os.getpid(), child.pid, flush=True); child.wait()"
    )
    task, child = map(int, started.answer()["text"].split())
    assert started.process.stdin is not None
    if how == "closed":
        started.process.stdin.close()
    elif how == "killed":
        started.process.kill()
    started.process.wait(10)
    deadline = time.monotonic() + 10
    pids = [task] if how == "killed" else [task, child]
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if how == "killed":
        os.kill(child, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
