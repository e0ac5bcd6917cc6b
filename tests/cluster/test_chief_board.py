"""Tasks that others started learn that their chief is done, or that it is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import free_ports

from kdist.cluster.network.tcp_timeouts import TcpTimeouts
from kdist.cluster.processes import chief_board
from kdist.cluster.processes.chief_board import AskedByTasks, Chief, tell_tasks
from kdist.cluster.processes.child import end_children
from kdist.cluster.processes.forkserver import ForkServer, TaskProgram, fork_server, start_task
from kdist.cluster.processes.server import TaskOptions
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError
from kdist.threads import in_thread

pytestmark = pytest.mark.cluster

PS = [Task("ps", 0), Task("ps", 1)]


class ChiefsServer:
    """The server that a chief starts for itself, in a process of its own."""

    def __init__(self, forks: ForkServer | None, log: Path) -> None:
        (port,) = free_ports(1)
        self.spec = ClusterSpec(ps=["127.0.0.1:1", "127.0.0.1:2"], worker=["127.0.0.1:3"], chief=f"127.0.0.1:{port}")
        options = TaskOptions({"chief": [self.spec.chief]}, "chief", 0, intra_op_threads=0, inter_op_threads=0)
        program = TaskProgram("kdist.cluster.processes.server", options.to_json(), os.environ, log, prints_to_log=True)
        self.process = start_task(forks, program, start_timeout=60)
        self.tasks = [Chief(self.spec, task, 15) for task in PS]
        for task in self.tasks:
            task.wait_for_it(60)
        self.waiting = [in_thread(task.wait_until_done) for task in self.tasks]
        # Each has to have asked before the chief says anything.
        time.sleep(1)

    def end(self) -> None:
        end_children([self.process], 5)
        for task in self.tasks:
            task.stop()


@pytest.fixture
def server(tasks_prepared: None, tmp_path: Path) -> Iterator[ChiefsServer]:
    with fork_server(tmp_path / "forks.log") as forks:
        server = ChiefsServer(forks, tmp_path / "chief.log")
        yield server
        server.end()


def test_every_task_hears_that_the_chief_is_done(server: ChiefsServer) -> None:
    began = time.monotonic()
    assert not tell_tasks(server.spec, PS, timeout=20, will_resume=False)
    assert time.monotonic() - began < 10
    server.end()
    for waiting in server.waiting:
        assert waiting.result(10) is True


def test_every_task_hears_that_the_chief_was_stopped_and_one_that_does_not_acknowledge_is_named(
    server: ChiefsServer,
) -> None:
    assert tell_tasks(server.spec, [*PS, Task("worker", 0)], timeout=3, will_resume=True) == {"worker:0"}
    for waiting in server.waiting:
        assert waiting.result(10) is False


def test_a_chief_that_ends_right_after_the_word_is_done(server: ChiefsServer) -> None:
    # It does not wait until all have taken note, as when a task is slow to; the word has been out for a while.
    assert not tell_tasks(server.spec, [], timeout=20, will_resume=False)
    time.sleep(1)
    server.process.kill()
    for waiting in server.waiting:
        assert waiting.result(10) is True


def test_a_task_that_has_heard_it_does_not_wait_until_its_acknowledgement_is_answered(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # The second of two acknowledgements finds no place, and TensorFlow waits for one.
    monkeypatch.setattr(chief_board, "_MAX_ELEMENTS", 1)
    server: ChiefsServer = request.getfixturevalue("server")
    tell_tasks(server.spec, [], timeout=20, will_resume=False)
    for waiting in server.waiting:
        assert waiting.result(10) is True


def test_a_connection_that_ends_while_the_chief_is_there_is_made_again(server: ChiefsServer) -> None:
    assert server.spec.chief is not None
    network = TcpTimeouts([server.spec.chief], [], 15)
    network.disconnect(server.spec.chief)
    time.sleep(1)
    assert not any(waiting.done() for waiting in server.waiting)
    network.reconnect(server.spec.chief)
    assert not tell_tasks(server.spec, PS, timeout=20, will_resume=False)
    for waiting in server.waiting:
        assert waiting.result(10) is True


def test_a_chief_that_says_nothing_is_lost(server: ChiefsServer) -> None:
    server.process.kill()
    for index, waiting in enumerate(server.waiting):
        with pytest.raises(ClusterError, match=rf"ps:{index}: the chief \(chief at 127\.0\.0\.1:\d+\) exited without"):
            waiting.result(10)


def test_a_worker_that_waits_in_a_round_is_told_of_its_end_and_of_the_loss_of_the_chief(server: ChiefsServer) -> None:
    first, second = (threading.Event() for _ in range(2))
    server.tasks[0].at_end_of_round(1, first.set)
    server.tasks[0].at_end_of_round(2, second.set)
    asked = AskedByTasks(server.spec)
    asked.end_round(1)
    assert first.wait(10)
    assert not second.is_set()
    end_children([server.process], 0)
    assert second.wait(10)
