"""A process that was started knows its deadline, its part of the log, and how it ended."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import wait_until

from kdist.cluster.processes.child import end_children, log_tail, start_child, task_environment
from kdist.cluster.spec import Task
from kdist.errors import ClusterError

PROGRAM = "import sys; print('for the log', file=sys.stderr); print('out', flush=True); sys.stdin.read(); sys.exit({})"


def test_the_end_of_its_log_has_its_own_lines_only(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "task.log"
    log.parent.mkdir()
    log.write_text("of an earlier process\n")
    child = start_child([sys.executable, "-c", PROGRAM.format(3)], log, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"out\n"
    assert child.poll() is None
    child.stdin.close()
    assert child.how_it_ended() == "exit code 3"
    assert child.log_tail() == f"\n  log: {log} (last lines follow)\nfor the log"
    assert log.read_text() == "of an earlier process\nfor the log\n"
    end_children([child], 1)


@pytest.mark.parametrize(
    "fatal",
    [
        "F0000 00:00:1795857129.383469   17564 env.cc:225] Check failed: ret == 0 (11 vs. 0)Thread tf_ creation failed",
        "2026-11-28 09:00:00.1: F external/local_tsl/env.cc:225] ret == 0",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "Killed",
    ],
)
def test_the_reason_of_an_end_is_shown_where_a_stack_follows_it(fatal: str, tmp_path: Path) -> None:
    log = tmp_path / "task.log"
    stack = [f"    @ 0x7f {frame}" for frame in range(30)]
    log.write_text("\n".join(["imports", fatal, "*** Check failure stack trace", *stack]))
    expected = [f"\n  log: {log} (the fatal line and the last ones follow)", fatal, "...", *stack[-12:]]
    assert log_tail(log) == "\n".join(expected)
    log.write_text("\n".join(["imports", fatal, *stack[:5]]))
    assert log_tail(log) == "\n".join([f"\n  log: {log} (last lines follow)", "imports", fatal, *stack[:5]])


@pytest.mark.parametrize(
    ("own", "of_task"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_tasks_have_large_tensors_in_huge_pages_unless_it_is_said_otherwise(
    own: str | None, of_task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    assert task_environment(Task("ps", 0))["GLIBC_TUNABLES"] == of_task


def test_a_system_without_room_for_a_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ClusterError, match="the process cannot be started: Resource temporarily .*ulimit -u"):
        start_child(["true"])


def test_a_child_that_has_died_is_ended() -> None:
    child = start_child(["true"], stdout=subprocess.PIPE)
    child.wait(10)
    with suppress(BrokenPipeError):
        child.stdin.write(b"unread")
        child.stdin.flush()
    end_children([child], 1)


def test_it_prints_to_its_log_and_is_killed_if_it_does_not_end(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "task.log"
    program = "import signal; print('out', flush=True); signal.pause()"
    child = start_child([sys.executable, "-c", program], log, prints_to_log=True)
    wait_until(log.read_text, 20, "it prints")
    end_children([child], 0.1)
    assert child.how_it_ended() == "signal 9, SIGKILL"
    assert child.log_tail() == f"\n  log: {log} (last lines follow)\nout"


def test_it_is_late_until_it_has_started() -> None:
    child = start_child([sys.executable, "-S", "-c", "input()"], start_timeout=0.01, stderr=subprocess.DEVNULL)
    time.sleep(0.02)
    assert child.is_late
    child.has_started()
    assert not child.is_late
    assert child.log_tail() == ""
    end_children([child], 5)
