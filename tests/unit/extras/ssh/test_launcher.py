"""The end of a run of tasks, with connections that only take note."""

from __future__ import annotations

import os
import signal
import threading
from queue import SimpleQueue
from typing import Any

import pytest

from kdist.extras.ssh import launcher
from kdist.extras.ssh.connection import ConnectionClosed, Event, TaskExited, TaskOutput
from kdist.extras.ssh.hosts import Host

H1, H2 = Host("h1"), Host("h2")
TASKS = {H1: ("worker:0",), H2: ("ps:0", "ps:1")}


class Connection:
    def __init__(self) -> None:
        self.signals: list[int] = []

    def tell(self, *, signal: int) -> None:
        self.signals.append(signal)


def watch(*given: Event, grace_secs: float = 60, is_cluster: bool = True) -> tuple[int, list[int]]:
    """The exit code after these events, and the signals that each host was sent."""
    connections: dict[Host, Any] = {H1: Connection(), H2: Connection()}
    events: SimpleQueue[Event] = SimpleQueue()
    for event in given:
        events.put(event)
    code = launcher._Tasks(TASKS, connections, grace_secs, is_cluster=is_cluster).watch(events)
    assert connections[H1].signals == connections[H2].signals
    return code, connections[H1].signals


def ended(*codes: int) -> list[Event]:
    return [TaskExited(task, code) for task, code in zip(("worker:0", "ps:0", "ps:1"), codes)]


def test_it_ends_when_all_tasks_have(capsys: pytest.CaptureFixture[str]) -> None:
    printed = [TaskOutput("worker:0", 1, "step 1"), TaskOutput("ps:0", 2, "a warning")]
    assert watch(*printed, *ended(0, 0, 0)) == (0, [])
    assert capsys.readouterr() == ("worker:0 | step 1\n", "ps:0     | a warning\n")


@pytest.mark.parametrize(("codes", "code"), [((1, 75, 0), 1), ((75, 1, 0), 1), ((0, 0, 7), 7), ((143, 1, 0), 143)])
def test_the_first_failure_counts_unless_it_followed_from_another(codes: tuple[int, ...], code: int) -> None:
    assert watch(*ended(*codes))[0] == code


def test_a_task_that_was_killed_is_a_failure_of_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(TaskExited("ps:1", -9), *ended(75, 75)) == (75, [])
    assert capsys.readouterr().err == "kdist: ps:1 on h2 failed (signal 9, SIGKILL); ending the other tasks\n"


def test_tasks_that_have_joined_a_cluster_continue_without_one_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(TaskExited("ps:1", -9), *ended(0, 0), is_cluster=False) == (75, [])
    assert capsys.readouterr().err == "kdist: ps:1 on h2 failed (signal 9, SIGKILL)\n"


def test_tasks_that_do_not_end_are_told_and_then_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch(TaskExited("worker:0", 2), grace_secs=0.05) == (2, [signal.SIGTERM])
    monkeypatch.setattr(launcher, "_NOTICE_SECS", 0.01)
    assert watch(TaskExited("worker:0", 1), grace_secs=0.05) == (1, [signal.SIGTERM])
    assert capsys.readouterr().err.endswith("kdist: ps:0, ps:1 did not end in time; killed\n")


def test_a_connection_that_is_lost_is_a_failure_of_its_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(ConnectionClosed(H2, 255, "Connection reset"), *ended(0))[0] == 75
    assert "kdist: ps:0, ps:1: the connection with h2 was lost: Connection reset" in capsys.readouterr().err


def test_a_host_whose_tasks_have_ended_may_close() -> None:
    assert watch(TaskExited("ps:0", 0), TaskExited("ps:1", 0), ConnectionClosed(H2, 0, ""), *ended(0)) == (0, [])


@pytest.mark.parametrize(("number", "sent"), [(signal.SIGINT, signal.SIGINT), (signal.SIGHUP, signal.SIGTERM)])
def test_signals_are_forwarded_and_their_code_is_the_tasks(number: signal.Signals, sent: int) -> None:
    assert watch(number, *ended(130, 0, 0)) == (130, [sent])


def test_after_a_second_signal_tasks_have_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SAME_SIGNAL_SECS", -1.0)
    monkeypatch.setattr(launcher, "_SECOND_SIGNAL_SECS", 0.05)
    assert watch(signal.SIGTERM, signal.SIGTERM) == (143, [signal.SIGTERM, signal.SIGTERM])


def test_sigterm_at_a_time_limit_is_no_second_signal_after_the_one_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SAME_SIGNAL_SECS", -1.0)
    monkeypatch.setattr(launcher, "_SECOND_SIGNAL_SECS", 0.05)
    events: SimpleQueue[Event] = SimpleQueue()
    connections: dict[Host, Any] = {H1: Connection(), H2: Connection()}
    for event in (signal.SIGUSR1, signal.SIGTERM):
        events.put(event)
    saved = threading.Timer(0.3, lambda: list(map(events.put, ended(143, 0, 0))))
    saved.start()
    # They have saved, and were not killed, which is code 143 as well.
    tasks = launcher._Tasks(TASKS, connections, 60)
    assert tasks.watch(events) == 143
    assert not saved.is_alive()


def test_signals_that_were_ignored_before_stay_ignored() -> None:
    """As SIGHUP under nohup."""
    events: SimpleQueue[Event] = SimpleQueue()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launcher._receive_signals(events):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert events.get_nowait() == signal.SIGUSR1
    assert events.empty()
