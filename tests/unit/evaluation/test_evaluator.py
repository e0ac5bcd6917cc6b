"""Evaluators that share nothing with their chief but the run dir: what they know of it, how long they wait for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import models
import pytest
from fakes import ended_process, held_by, write_lock
from fsspec.implementations.memory import MemoryFileSystem
from helpers import toy_data

import kdist
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.errors import ClusterError, ConfigError
from kdist.evaluation import evaluator
from kdist.evaluation.evaluate import ValidationArguments
from kdist.evaluation.evaluator import ChiefWatch, evaluate_until_done
from kdist.model.source import ModelSource
from kdist.run.run_dir import RunDir
from kdist.storage import lock
from kdist.storage.object_storage import ObjectStorage

URL = "memory://bucket/run"
Observe = Callable[[], ChiefWatch]
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
    monkeypatch.setattr(evaluator, "time", clock)
    monkeypatch.setattr(lock, "time", clock)
    return clock


@pytest.fixture(params=["{}", "file://{}"])
def observe(
    request: pytest.FixtureRequest, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Observe]:
    """Observes the chief from now on, in a folder or at a URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ExitStack() as stack:

        def observe() -> ChiefWatch:
            files = RunDir(request.param.format(run_dir), "test")
            return ChiefWatch(stack.enter_context(files.open_for(str(EVALUATOR.task))), EVALUATOR, start_timeout=10)

        yield observe


def write_result(run_dir: Path, at: float, status: str = "done") -> None:
    (run_dir / "result.json").write_text(json.dumps({"status": status}))
    os.utime(run_dir / "result.json", (at, at))


def test_it_is_done_when_it_has_left_with_a_result(observe: Observe, run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by())
    chief = observe()
    assert not chief.is_done()
    write_result(run_dir, at=2.0)
    assert not chief.is_done()
    (run_dir / ".lock").unlink()
    assert chief.is_done()


def test_the_result_of_an_earlier_run_says_nothing(observe: Observe, run_dir: Path, clock: Clock) -> None:
    run_dir.mkdir()
    write_result(run_dir, at=2.0)
    chief = observe()
    assert not chief.is_done()
    # Whichever clock is ahead.
    write_result(run_dir, at=1.0)
    assert chief.is_done()


def test_a_chief_that_does_not_come_is_waited_for_so_long(observe: Observe, run_dir: Path, clock: Clock) -> None:
    chief = observe()
    clock.now += 10
    assert not chief.is_done()
    clock.now += 1
    with pytest.raises(ClusterError, match=r"evaluator:0: no chief trains in .*run for 11 s \(cluster.start_timeout\)"):
        chief.is_done()


def test_a_run_that_was_done_before_is_waited_for_in_vain(observe: Observe, run_dir: Path, clock: Clock) -> None:
    run_dir.mkdir()
    write_result(run_dir, at=2.0)
    chief = observe()
    clock.now += 10
    assert not chief.is_done()
    clock.now += 1
    assert chief.is_done()


def test_a_chief_that_has_failed_is_an_error(observe: Observe, run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, held_by())
    chief = observe()
    assert not chief.is_done()
    write_result(run_dir, at=2.0, status="failed")
    (run_dir / ".lock").unlink()
    with pytest.raises(ClusterError, match="evaluator:0: the chief .* has failed; see .*result.json"):
        chief.is_done()


@pytest.mark.parametrize("leaves_its_lock", [True, False])
def test_a_chief_that_was_killed_is_gone(observe: Observe, run_dir: Path, clock: Clock, leaves_its_lock: bool) -> None:
    write_lock(run_dir, held_by())
    chief = observe()
    assert not chief.is_done()
    (run_dir / ".lock").unlink()
    if leaves_its_lock:
        (run_dir / ".lock").write_text(held_by(pid=ended_process()))
    assert not chief.is_done()
    clock.now += 11
    with pytest.raises(ClusterError, match="evaluator:0: the chief .* exited without reporting completion"):
        chief.is_done()


def test_the_lock_of_a_chief_that_was_killed_before_keeps_nobody_from_waiting(
    observe: Observe, run_dir: Path, clock: Clock
) -> None:
    write_lock(run_dir, held_by(pid=ended_process()))
    chief = observe()
    for _ in range(2):
        assert not chief.is_done()
        clock.now += 8
    (run_dir / ".lock").write_text(held_by())
    assert not chief.is_done()


def test_a_chief_on_this_machine_is_waited_for_as_long_as_it_is_there(
    observe: Observe, run_dir: Path, clock: Clock
) -> None:
    write_lock(run_dir, held_by())
    chief = observe()
    for _ in range(5):
        clock.now += 1000
        assert not chief.is_done()


def test_a_chief_elsewhere_has_a_heartbeat(observe: Observe, run_dir: Path, clock: Clock) -> None:
    write_lock(run_dir, ELSEWHERE)
    chief = observe()
    for _ in range(5):
        os.utime(run_dir / ".lock")
        clock.now += 1000
        assert not chief.is_done()
    # It is silent for a minute of this process.
    clock.now += 61
    assert not chief.is_done()
    clock.now += 11
    with pytest.raises(ClusterError, match=r"\(chief at c:1\) exited without reporting completion"):
        chief.is_done()


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The validation loss of a run on object storage that is done."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(evaluator, "_COSTLY_LOOK_SECS", 0.01)
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, run_dir=URL)
    trainer.fit(x, y, steps=5, validation_data=(x, y), verbose=0)
    yield trainer.result.metrics["validation"]["loss"]
    MemoryFileSystem.store.clear()


def evaluate(print_line: Callable[[str], None]) -> None:
    validation, source = ValidationArguments(toy_data()), ModelSource(models.mlp, "test", on_servers=False)
    evaluate_until_done(source, validation, RunDir(URL, "test", 0.1), EVALUATOR, start_timeout=1, print_line=print_line)


def objects() -> set[str]:
    return {re.sub(r"(tfevents)\..*", r"\1", path.partition("/run/")[2]) for path in MemoryFileSystem.store}


def test_it_reads_checkpoints_from_object_storage_and_leaves_its_results_there(trained: float, tmp_path: Path) -> None:
    before, said, here = objects(), [], []

    def print_line(line: str) -> None:
        said.append(line)
        here.append({path.name for path in tmp_path.rglob("kdist/*-evaluator-0/*")})

    evaluate(print_line)
    assert said[0].endswith(f"evaluator:0 of 1ps1w | evaluates {URL}/checkpoints")
    assert f"eval  | step      5 | loss {trained:.4f}" in said[1]
    assert said[2:] == ["done  | evaluator:0 | the chief has finished"]
    assert objects() - before == {"tb/evaluator/events.out.tfevents"}
    # A checkpoint is here only while it is read, and nothing is left at the end.
    assert here[1] == {".lock"}
    assert not list(tmp_path.rglob("kdist/*-evaluator-0"))


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_passed_over(
    trained: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ObjectStorage.fetch

    def deleted_first(storage: ObjectStorage, names: Sequence[str]) -> None:
        storage.delete(names)
        real(storage, names)

    monkeypatch.setattr(ObjectStorage, "fetch", deleted_first)
    with RunDir(URL, "test", 0.1).open_for(str(EVALUATOR.task)) as run:
        assert run.checkpoints().steps()[-1] == 5
        assert run.checkpoints().read(5) is None
        assert not run.checkpoints().folder.exists()


def test_storage_that_fails_ends_it_after_a_while_and_another_try_may_help(
    trained: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_line(line: str) -> None:
        if "eval " in line:
            monkeypatch.setattr(MemoryFileSystem, "cat_file", broken)

    def broken(*_: object) -> None:
        raise ConnectionError("reset by peer")

    message = rf"^evaluator:0: run\.dir={URL}: storage fails: ConnectionError: reset by peer$"
    with pytest.raises(ClusterError, match=message):
        evaluate(print_line)


def test_storage_that_refuses_is_a_wrong_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(MemoryFileSystem, "find", refuses)
    with pytest.raises(ConfigError, match=rf"^run\.dir={URL}: access is denied: PermissionError: Forbidden"):
        evaluate(pytest.fail)
    assert not list(tmp_path.iterdir())


def test_a_second_evaluator_on_this_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = rf"run\.dir={URL} \(evaluator:0\): is in use by this process itself"
    with (
        RunDir(URL, "test").open_for(str(EVALUATOR.task)),
        pytest.raises(ConfigError, match=message),
        RunDir(URL, "test").open_for(str(EVALUATOR.task)),
    ):
        pytest.fail("it has started")
