"""Requests to resize a run: who may ask, in which order they are made, and what becomes of them."""

import errno
import os
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kdist.cli import resize
from kdist.cluster.spec import ClusterChange, ClusterShape, Task
from kdist.errors import ClusterError, ConfigError, ResizeError
from kdist.run.resizes import Resize, Resizer, ResizeRequests, ask
from kdist.strategies.base import PendingResize


class FakeStrategy:
    """Changes its shape as it is told; tests say when tasks are ready."""

    def __init__(self) -> None:
        self.shape = ClusterShape(1, 2)
        self.is_ready, self.leaving, self.cancelled = True, set[Task](), 0
        self.error: Exception | None = None
        self.joining: ClusterChange | None = None
        self.refused: list[str] = []

    def tasks_to_leave(self) -> set[Task]:
        leaving, self.leaving = self.leaving, set()
        return leaving

    def tasks_to_join(self) -> ClusterChange | None:
        return self.joining

    def refuse_to_join(self, why: str) -> None:
        self.joining = None
        self.refused.append(why)

    def begin_resize(self, change: ClusterChange) -> PendingResize:
        workers = self.shape.num_workers - 1 if change.leave else change.workers or self.shape.num_workers
        return PendingResize(self.shape, ClusterShape(1, workers))

    def may_finish(self, resize: PendingResize) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_ready

    def cancel_resize(self, resize: PendingResize) -> None:
        self.cancelled += 1


class Run:
    """A session that asks its `Resizer` between two runs."""

    def __init__(self, timeout: float = 100.0, min_workers: int = 1) -> None:
        self.requests, self.strategy = ResizeRequests(), FakeStrategy()
        self.resizer = Resizer(self.requests, timeout, min_workers)

    def step(self) -> None:
        strategy: Any = self.strategy
        self.resizer.advance(strategy, 7, self.finish)

    def finish(self, request: Any, resize: PendingResize) -> Resize:
        self.strategy.shape = resize.after
        return Resize(7, str(resize.before), str(resize.after), str(request.change), request.why, 0.1, 0.2, "now")

    def ask(self, *words: str) -> Future[Resize]:
        return self.requests.add(ClusterChange.parse(words), "the test")


def test_requests_are_made_one_after_the_other_when_their_tasks_are_ready() -> None:
    run = Run()
    run.strategy.is_ready = False
    first, second = run.ask("workers=3"), run.ask("workers=1")
    run.step()
    run.step()
    assert not first.done()
    run.strategy.is_ready = True
    run.step()
    run.step()

    assert (first.result().before, first.result().after) == ("1ps2w", "1ps3w")
    assert (second.result().before, second.result().after) == ("1ps3w", "1ps1w")


def test_a_change_that_fails_or_is_late_is_cancelled_and_the_next_one_is_made() -> None:
    run = Run(timeout=0.0)
    run.strategy.error = ClusterError("worker:2 exited while starting")
    failed = run.ask("workers=3")
    with pytest.warns(UserWarning, match="workers=3: worker:2 exited while starting; training continues on 1ps2w"):
        run.step()
    run.strategy.error, run.strategy.is_ready = None, False
    late = run.ask("workers=3")
    with pytest.warns(UserWarning, match=r"workers=3: not finished in 0 s \(cluster.step_timeout\)"):
        run.step()
    run.strategy.is_ready = True
    made = run.ask("workers=3")
    run.step()

    assert isinstance(failed.exception(), ResizeError)
    assert isinstance(late.exception(), ResizeError)
    assert run.strategy.cancelled == 2
    assert made.result().after == "1ps3w"


def test_a_disk_that_is_full_ends_the_change_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, full = Run(), OSError(errno.ENOSPC, "No space left on device", "/runs/logs/worker-2.log")
    run.strategy.error = full  # type: ignore[assignment]
    later = run.ask("workers=3")
    with pytest.warns(UserWarning, match="No space left on device: '/runs/logs/worker-2.log'; training continues on"):
        run.step()

    def begin(_: ClusterChange) -> PendingResize:
        raise full

    monkeypatch.setattr(run.strategy, "begin_resize", begin)
    at_once = run.ask("workers=3")
    run.step()

    for outcome in (later, at_once):
        assert isinstance(outcome.exception(), ResizeError)
        assert str(outcome.exception()).startswith("workers=3: [Errno 28] No space left on device")


def test_fewer_workers_than_the_least_are_refused_but_one_that_is_told_to_leave_leaves() -> None:
    run = Run(min_workers=2)
    refused = run.ask("workers=1")
    run.step()
    assert str(refused.exception()) == "workers=1: fewer than cluster.min_workers=2"
    run.strategy.leaving = {Task("worker", 1)}
    run.step()
    assert str(run.strategy.shape) == "1ps1w"


def test_tasks_that_cannot_join_are_told_why() -> None:
    run = Run(min_workers=2)
    run.strategy.joining = ClusterChange(workers=1)
    run.step()
    run.step()
    assert run.strategy.refused == ["workers=1: fewer than cluster.min_workers=2"]


def test_whoever_waits_for_a_change_hears_of_any_error_that_ends_the_run() -> None:
    run = Run()

    def fails(*_: Any) -> Resize:
        raise ValueError("of a hook of the user's")

    run.finish = fails  # type: ignore[method-assign]
    asked = run.ask("workers=3")
    with pytest.raises(ValueError, match="of a hook"):
        run.step()
    assert isinstance(asked.exception(timeout=0), ValueError)


def test_the_present_shape_is_no_change() -> None:
    run = Run()
    same = run.ask("workers=2")
    run.step()
    assert (same.result().before, same.result().after, same.result().seconds) == ("1ps2w", "1ps2w", 0.0)


def test_another_process_asks_by_a_file_that_only_this_user_can_write(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(ConfigError, match="no run is training there"):
        ask(tmp_path, ["workers=3"], "me", lambda: True, 5)
    run.requests.open(tmp_path)
    assert (tmp_path / ".resize").stat().st_mode & 0o777 == 0o700
    answers: list[Any] = []

    def asks(*words: str) -> None:
        try:
            answers.append(ask(tmp_path, list(words), "me", lambda: True, 20))
        except Exception as error:  # noqa: BLE001 - looked at below
            answers.append(error)

    asking = [threading.Thread(target=asks, args=[f"workers={n}"]) for n in [*range(1, 11), 0]]
    for each in asking:
        each.start()
    while any(each.is_alive() for each in asking):
        run.step()
        asking[0].join(0.02)

    assert len(answers) == 11
    (refused,) = (answer for answer in answers if isinstance(answer, ConfigError))
    assert str(refused) == "workers=0: fewer than cluster.min_workers=1"
    assert sum(isinstance(answer, Resize) for answer in answers) == 10
    assert not list((tmp_path / ".resize").iterdir())
    run.resizer.close(run.strategy)  # type: ignore[arg-type]
    assert not (tmp_path / ".resize").exists()
    ended = run.ask("workers=3")
    assert str(ended.exception()) == "the run has ended, and cannot be resized"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_told_whose_run_it_is(tmp_path: Path) -> None:
    # Those of pytest are closed to others.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        run_dir, said = Path(folder) / "run", Path(folder) / "said"
        run_dir.mkdir(0o700)
        said.touch()
        said.chmod(0o666)
        if not (pid := os.fork()):
            os.setuid(65534)
            with suppress(BaseException):
                try:
                    resize.run([str(run_dir), "workers=3"])
                except ConfigError as error:
                    said.write_text(str(error))
            os._exit(0)
        os.waitpid(pid, 0)
        assert said.read_text() == f"{run_dir}: its run belongs to another user, who alone may resize it"


def test_a_request_that_is_still_being_written_waits(tmp_path: Path) -> None:
    run = Run()
    run.requests.open(tmp_path)
    unfinished = tmp_path / ".resize" / ".1.request.json"
    unfinished.write_text('{"chan')
    run.step()
    assert [path.name for path in (tmp_path / ".resize").iterdir()] == [unfinished.name]
    unfinished.write_text('{"change": ["workers=3"]}')
    unfinished.rename(tmp_path / ".resize" / "1.request.json")
    run.requests._looked = 0.0
    run.step()
    assert str(run.strategy.shape) == "1ps3w"


def test_what_is_asked_for_when_the_run_ends_is_answered(tmp_path: Path) -> None:
    run = Run()
    run.requests.open(tmp_path)
    run.strategy.is_ready = False
    waiting, next_one = run.ask("workers=3"), run.ask("workers=4")
    run.step()
    with pytest.warns(UserWarning, match="the run has ended"):
        run.resizer.close(run.strategy)  # type: ignore[arg-type]

    for outcome in (waiting, next_one):
        assert str(outcome.exception()) == "the run has ended, and cannot be resized"
    with pytest.raises(ConfigError, match="no run is training there"):
        ask(tmp_path, ["workers=3"], "me", lambda: True, 5)
