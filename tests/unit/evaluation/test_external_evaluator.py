"""What an evaluator that shares nothing but the run dir knows of its chief, and for how long it waits for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import keras  # noqa: F401
import models
import pytest
from fakes import ended_process, held_by, write_lock

from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.errors import ClusterError, ConfigError
from kdist.evaluation import external_evaluator
from kdist.evaluation.evaluate import ValidationArguments
from kdist.evaluation.external_evaluator import ObservedChief, evaluate_until_done
from kdist.model.source import ModelSource
from kdist.run.run_dir import RunDir

ELSEWHERE = held_by(host="another machine")
EVALUATOR = Membership(ClusterSpec(("a:1",), ("b:1",), "c:1"), Task("evaluator", 0))


class Clock:
    """Time that passes when the test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(external_evaluator, "time", clock)
    return clock


def observed(run_dir: Path) -> ObservedChief:
    return ObservedChief(RunDir(run_dir, "test"), EVALUATOR, start_timeout=10)


def write_result(run_dir: Path, at: float, status: str = "done") -> None:
    (run_dir / "result.json").write_text(json.dumps({"status": status}))
    os.utime(run_dir / "result.json", (at, at))


def test_it_is_done_when_it_has_left_with_a_result(run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by())
    chief = observed(run_dir)
    assert not chief.is_done()
    write_result(run_dir, at=2.0)
    assert not chief.is_done()
    (run_dir / ".lock").unlink()
    assert chief.is_done()


def test_the_result_of_an_earlier_run_says_nothing(run_dir: Path, clock: Clock) -> None:
    run_dir.mkdir()
    write_result(run_dir, at=2.0)
    chief = observed(run_dir)
    assert not chief.is_done()
    # Whichever clock is ahead.
    write_result(run_dir, at=1.0)
    assert chief.is_done()


def test_a_chief_that_does_not_come_is_waited_for_so_long(run_dir: Path, clock: Clock) -> None:
    chief = observed(run_dir)
    clock.now += 10
    assert not chief.is_done()
    clock.now += 1
    with pytest.raises(ClusterError, match=r"evaluator:0: no chief trains in .*run for 11 s \(cluster.start_timeout\)"):
        chief.is_done()


def test_a_run_that_was_done_before_is_waited_for_in_vain(run_dir: Path, clock: Clock) -> None:
    run_dir.mkdir()
    write_result(run_dir, at=2.0)
    chief = observed(run_dir)
    clock.now += 10
    assert not chief.is_done()
    clock.now += 1
    assert chief.is_done()


def test_a_chief_that_has_failed_is_an_error(run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by())
    chief = observed(run_dir)
    assert not chief.is_done()
    write_result(run_dir, at=2.0, status="failed")
    (run_dir / ".lock").unlink()
    with pytest.raises(ClusterError, match="evaluator:0: the chief .* has failed; see .*result.json"):
        chief.is_done()


@pytest.mark.parametrize("leaves_its_lock", [True, False])
def test_a_chief_that_was_killed_is_gone(run_dir: Path, clock: Clock, leaves_its_lock: bool) -> None:
    write_lock(run_dir, held_by())
    chief = observed(run_dir)
    assert not chief.is_done()
    (run_dir / ".lock").unlink()
    if leaves_its_lock:
        (run_dir / ".lock").write_text(held_by(pid=ended_process()))
    assert not chief.is_done()
    clock.now += 11
    with pytest.raises(ClusterError, match="evaluator:0: the chief .* exited without reporting completion"):
        chief.is_done()


def test_the_lock_of_a_chief_that_was_killed_before_keeps_nobody_from_waiting(run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by(pid=ended_process()))
    chief = observed(run_dir)
    for _ in range(2):
        assert not chief.is_done()
        clock.now += 8
    (run_dir / ".lock").write_text(held_by())
    assert not chief.is_done()


def test_a_chief_on_this_machine_is_waited_for_as_long_as_it_is_there(run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by())
    chief = observed(run_dir)
    for _ in range(5):
        clock.now += 1000
        assert not chief.is_done()


def test_a_chief_elsewhere_has_a_heartbeat(run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, ELSEWHERE)
    chief = observed(run_dir)
    for _ in range(5):
        os.utime(run_dir / ".lock")
        clock.now += 1000
        assert not chief.is_done()
    os.utime(run_dir / ".lock", (1, 1))
    assert not chief.is_done()
    clock.now += 11
    with pytest.raises(ClusterError, match=r"\(chief at c:1\) exited without reporting completion"):
        chief.is_done()


def test_it_reads_no_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files, source = RunDir("memory://bucket/run", "test"), ModelSource(models.mlp, "test", on_servers=False)
    with pytest.raises(
        ConfigError, match=r"^evaluator:0: run\.dir=memory://bucket/run: an evaluator that others start"
    ):
        evaluate_until_done(
            source, ValidationArguments(([], [])), files, EVALUATOR, start_timeout=1, print_line=pytest.fail
        )
    assert not list(tmp_path.iterdir())
