"""Children that the user's code forks are the user's: they end as anybody's, and end nothing of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from rich.console import Console

from kdist.cluster.processes.child import end_with_parent
from kdist.console.live import TerminalLine
from kdist.fit.signals import StopSignals
from kdist.forks import children_end_here, keep_from_children, undo_in_children


def forked(function: Callable[[], object]) -> int:
    """The process id of a child that calls a function, and exits with its integer, or 1."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            os._exit(int(function()))  # type: ignore[call-overload]
        os._exit(1)
    return pid


def how_it_ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_is_terminated_by_a_stop_signal_while_the_session_goes_on() -> None:
    interrupted: list[str] = []

    class Session:
        is_started = True
        interrupt = staticmethod(interrupted.append)
        print_line = staticmethod(print)

    with StopSignals(Session(), 30):  # type: ignore[arg-type]
        child = forked(lambda: time.sleep(60))
        os.kill(child, signal.SIGTERM)
        assert how_it_ended(child) == -signal.SIGTERM
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.raise_signal(signal.SIGTERM)
    assert interrupted == ["SIGTERM"]
    # Nothing is left to undo.
    assert how_it_ended(forked(lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)) == 1


def test_children_of_a_task_are_terminated_though_the_task_ignores_the_signal() -> None:
    end_with_parent_and_start = (
        f"import os, subprocess, time; from {end_with_parent.__module__} import end_with_parent; end_with_parent()\n"
        "child = os.fork()\nif not child: time.sleep(60)\n"
        "os.kill(os.getpid(), 15); os.kill(child, 15); other = subprocess.Popen(['sleep', '60']); other.terminate()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), other.wait(), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", end_with_parent_and_start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as task:
        assert task.stdout is not None
        assert task.stdout.readline() == "-15 -15\n"


def test_a_pipe_to_a_task_closes_although_a_child_lives_on() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        keep_from_children(pipe)
        child = forked(lambda: time.sleep(60))
    try:
        assert os.read(reading, 1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        how_it_ended(child)
        os.close(reading)


def test_a_child_that_leaves_the_code_of_the_user_ends_there(capfd: pytest.CaptureFixture[str]) -> None:
    def leave_by(error: BaseException) -> int:
        """The exit code of a child that is forked in a callback."""
        child = 0

        def callback() -> None:
            nonlocal child
            child = os.fork()
            if not child:
                raise error

        try:
            with children_end_here():
                callback()
        except BaseException:  # noqa: BLE001 - in the child only, if it did not end
            os._exit(99)
        return how_it_ended(child)

    assert [leave_by(SystemExit(7)), leave_by(SystemExit()), leave_by(SystemExit("so"))] == [7, 0, 1]
    assert leave_by(ValueError("of the child")) == 1
    assert "ValueError: of the child" in capfd.readouterr().err
    with pytest.raises(ValueError, match="of this process"), children_end_here():
        raise ValueError("of this process")


def test_a_child_prints_to_the_file_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = sys.stdout
    monkeypatch.setattr("kdist.console.live.Console", lambda file: Console(file=file, force_terminal=True))
    line = TerminalLine()
    try:
        assert sys.stdout is not terminal
        assert how_it_ended(forked(lambda: sys.stdout is terminal)) == 1
    finally:
        line.close()


def test_the_last_that_was_done_is_undone_first() -> None:
    reading, writing = os.pipe()
    ends = [undo_in_children(lambda word=word: os.write(writing, word)) for word in (b"1", b"2", b"3")]
    ends[1]()
    how_it_ended(forked(lambda: 0))
    assert os.read(reading, 9) == b"31"
    for end in ends:
        end()
    for descriptor in (reading, writing):
        os.close(descriptor)
