"""Signals to a run: the first one ends it in good order, a second one at once; schedulers repeat theirs."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kdist.cluster.spec import Task
from kdist.config.checks import STOP_SIGNALS, check_stop_signals
from kdist.errors import ConfigError
from kdist.fit import signals
from kdist.fit.signals import StopSignals, TaskSignals, task_signals

ALL = ("SIGINT", *STOP_SIGNALS)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(signals, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = {name: signal.getsignal(signal.Signals[name]) for name in ALL}
    yield
    assert {name: signal.getsignal(signal.Signals[name]) for name in ALL} == before


class Session:
    """The part of one that `StopSignals` needs."""

    def __init__(self, is_started: bool = True) -> None:
        self.is_started = is_started
        self.interrupted_by: list[str] = []
        self.checkpoints = SimpleNamespace(newest=lambda: None)
        self.print_line = lambda line: None

    def interrupt(self, reason: str) -> None:
        self.interrupted_by.append(reason)

    request_stop = interrupt


def raised(*names: str) -> None:
    for name in names:
        signal.raise_signal(signal.Signals[name])


@pytest.mark.parametrize("name", ALL)
def test_each_signal_interrupts_a_session(clock: Clock, name: str) -> None:
    session: Any = Session()
    with StopSignals(session, 30) as stop:
        raised(name, name)
    assert session.interrupted_by == [name]
    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit) as error:
        stop.raise_received()
    if name != "SIGINT":
        assert error.value.args == (143,)


@pytest.mark.parametrize("name", STOP_SIGNALS)
def test_before_the_session_has_started_there_is_nothing_to_save(clock: Clock, name: str) -> None:
    with pytest.raises(SystemExit, match="143"), StopSignals(Session(is_started=False), 30):  # type: ignore[arg-type]
        raised(name)


def in_a_library(name: str) -> None:
    """Raises a signal that arrives before the assignment."""
    try:
        raised(name)
        found = 1
    finally:
        found += 1


def test_an_exit_that_a_library_has_turned_into_an_error_is_an_exit_again(clock: Clock) -> None:
    session: Any = Session(is_started=False)
    with pytest.raises(SystemExit, match="143"), StopSignals(session, 30):
        in_a_library("SIGTERM")
    with pytest.raises(SystemExit, match="0"), TaskSignals(Task("ps", 1), 30):
        in_a_library("SIGTERM")


def test_an_exit_that_a_library_has_discarded_is_not_forgotten(clock: Clock) -> None:
    with TaskSignals(Task("ps", 1), 30) as stop:
        with suppress(SystemExit):
            raised("SIGTERM")
        with pytest.raises(SystemExit, match="0"):
            stop.begin_to_serve()


def test_an_error_of_a_running_session_stays_what_it_is(clock: Clock) -> None:
    def fail_after_a_signal() -> None:
        raised("SIGTERM")
        raise RuntimeError

    session: Any = Session()
    with pytest.raises(RuntimeError), StopSignals(session, 30):
        fail_after_a_signal()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_stop_signal_before_the_config_is_read_ends_the_command_line(is_replaced: bool) -> None:
    code = (
        "import signal, sys\n"
        "from kdist.cli import main as cli, train\n"
        "from kdist.fit import signals\n"
        "def run(_):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        found = 1\n"
        f"    {'finally' if is_replaced else 'except SystemExit'}:\n"
        f"        {'found += 1' if is_replaced else 'pass'}\n"
        "    with signals.StopSignals(None, 30):\n"
        "        print('trains')\n"
        "train._run_once = run\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "kdist: terminated\n")


@pytest.mark.parametrize(("secs", "ends_at_once"), [(0.01, False), (0.4, False), (0.6, True)])
def test_a_second_signal_ends_at_once_unless_it_is_the_same(clock: Clock, secs: float, ends_at_once: bool) -> None:
    session: Any = Session()
    with StopSignals(session, 30):
        raised("SIGTERM")
        clock.now += secs
        if ends_at_once:
            with pytest.raises(SystemExit, match="143"):
                raised("SIGTERM")
        else:
            raised("SIGTERM")
    assert session.interrupted_by == ["SIGTERM"]


def test_sigterm_at_the_time_limit_after_sigusr1_ahead_of_it_is_no_second_signal(clock: Clock) -> None:
    session: Any = Session()
    with StopSignals(session, 30):
        raised("SIGUSR1")
        clock.now += 20
        raised("SIGTERM")
        clock.now += 0.01
        raised("SIGTERM")
        clock.now += 1
        with pytest.raises(SystemExit):
            raised("SIGTERM")
    assert session.interrupted_by == ["SIGUSR1"]


def test_a_signal_that_is_not_named_does_what_it_did(clock: Clock) -> None:
    session: Any = Session()
    with StopSignals(session, 30, ["SIGTERM"]):
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_a_program_that_handles_sigusr1_itself_keeps_it(clock: Clock) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        session: Any = Session()
        with StopSignals(session, 30):
            raised("SIGUSR1")
        assert session.interrupted_by == []
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_is_caught_in_c_stays_there(clock: Clock) -> None:
    faulthandler.register(signal.SIGUSR2)
    try:
        session: Any = Session()
        with StopSignals(session, 30):
            raised("SIGUSR2")
        assert session.interrupted_by == []
        # Without its handler it would end this process.
        raised("SIGUSR2")
    finally:
        faulthandler.unregister(signal.SIGUSR2)


def test_what_is_ignored_stays_ignored(clock: Clock) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        session: Any = Session()
        with StopSignals(session, 30):
            raised("SIGTERM")
        assert session.interrupted_by == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_task_that_the_chief_has_not_reached_ends(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error, TaskSignals(Task("ps", 1), 30):
        raised("SIGTERM")
    assert error.value.code == 0
    assert capsys.readouterr().out == "done  | ps:1 | stopped by SIGTERM before the chief started\n"


def test_a_task_that_serves_goes_on(clock: Clock) -> None:
    with TaskSignals(Task("ps", 1), 7) as stop:
        stop.begin_to_serve()
        with pytest.warns(
            UserWarning, match="ps:1: SIGUSR1; it serves until the chief has saved, or does without it, at most 7 s"
        ):
            raised("SIGUSR1")
        raised("SIGUSR1")
        clock.now += 1
        with pytest.raises(SystemExit, match="143"):
            raised("SIGUSR1")


def test_what_is_called_inside_has_the_same_signals(clock: Clock) -> None:
    with task_signals(Task("ps", 1), 7) as outer, task_signals(Task("ps", 1), 9) as inner:
        assert inner is outer
    with task_signals(Task("ps", 1), 9) as later:
        assert later is not outer


def test_a_name_that_is_no_stop_signal_is_refused() -> None:
    check_stop_signals("run.stop_signals", ["SIGXCPU", "SIGHUP"])
    with pytest.raises(ConfigError, match=r"run\.stop_signals=SIGKILL: choose from SIGTERM, SIGUSR1, SIGUSR2, SIGHUP"):
        check_stop_signals("run.stop_signals", ["SIGKILL"])


def test_a_child_ignores_signals_from_its_first_moment() -> None:
    code = "import time; from kdist.cluster.processes.child import end_with_parent; "
    code += "end_with_parent(); print(1, flush=True); "
    from kdist.cluster.processes.child import end_children, start_child

    child = start_child([sys.executable, "-c", f"{code} time.sleep(60)"], stdout=subprocess.PIPE)
    for name in ALL:
        os.kill(child.pid, signal.Signals[name])
    assert child.stdout.readline() == b"1\n"
    for name in ALL:
        os.kill(child.pid, signal.Signals[name])
    assert child.poll() is None
    end_children([child], 10)
    assert child.poll() == 0
