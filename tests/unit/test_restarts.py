"""Sessions whose cluster fails: they go back to the newest checkpoint, so often and no more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
from fakes import CountingStrategy, FakeCheckpoints, FakeSpec, FakeSummaries, Recorder, run_all

from kdist.errors import ClusterError, TornUpdateError
from kdist.hooks import CheckpointSaver, Hook, StopAtStep
from kdist.session import TrainSession


class FailingStrategy(CountingStrategy):
    """Loses a task when it comes to one of some steps, each time that it does for the first time."""

    error: ClassVar[ClusterError] = ClusterError("ps:0 is lost (killed)")

    def __init__(self, fail_at: set[int], fail_in: str = "run") -> None:
        super().__init__()
        self._fail_at_steps, self._fail_in = fail_at, fail_in

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> Any:
        self._fail("run", self.step + num_steps)
        return super().run(num_steps, interrupted, may_begin)

    def begin_save(self, prefix: Any, since: Any = None, *, aside: bool = True) -> Any:
        self._fail("save", self.step)

    def _fail(self, what: str, step: int) -> None:
        if what == self._fail_in and step in self._fail_at_steps:
            self._fail_at_steps.discard(step)
            raise self.error


class SavedCheckpoints(FakeCheckpoints):
    """Restores what was saved last."""

    def write(self, step: int, stored: Any, *, keep: int, since: Any = None) -> Any:
        stored.begin_save(self.folder, aside=False)
        self.restorable = step
        return super().write(step, stored, keep=keep)


def session_that_fails(
    fail_at: set[int],
    hooks: list[Hook],
    *,
    fail_in: str = "run",
    max_restarts: int = 3,
    may_restart_tasks: bool = True,
) -> tuple[TrainSession, list[FailingStrategy]]:
    made: list[FailingStrategy] = []

    def make() -> FailingStrategy:
        made.append(FailingStrategy(fail_at, fail_in))
        return made[-1]

    session = TrainSession(
        make,
        FakeSpec(),  # type: ignore[arg-type]
        hooks,
        checkpoints=SavedCheckpoints(),  # type: ignore[arg-type]
        summaries=FakeSummaries(),  # type: ignore[arg-type]
        max_restarts=max_restarts,
        may_restart_tasks=may_restart_tasks,
        print_line=lambda line: None,
    )
    return session, made


def savers(last_step: int = 100) -> list[Hook]:
    return [CheckpointSaver(every_steps=20), StopAtStep(last_step=last_step)]


def test_a_failed_cluster_is_started_again_from_the_newest_checkpoint() -> None:
    recorder = Recorder()
    session, made = session_that_fails({60}, [recorder, *savers()])
    with pytest.warns(UserWarning, match=r"ps:0 is lost \(killed\); restarting the cluster from .*ckpt-40 \(1 of 3"):
        run_all(session)
    assert (session.global_step, session.stopped_by) == (100, "StopAtStep")
    assert session.restarts == {"worker": 0, "cluster": 1}
    assert [strategy.stopped for strategy in made] == [1, 1]
    assert recorder.events.count("begin") == recorder.events.count("end") == 1
    assert recorder.events.count("after_create_session") == 2
    # TensorBoard drops what was written after them.
    assert vars(session.summaries)["restarts"] == [0, 40]


@pytest.mark.parametrize("may_restart_tasks", [True, False])
def test_after_a_torn_update_the_tasks_stay(monkeypatch: pytest.MonkeyPatch, may_restart_tasks: bool) -> None:
    monkeypatch.setattr(FailingStrategy, "error", TornUpdateError("worker:1 was lost in the middle of an update"))
    session, made = session_that_fails({60}, savers(), may_restart_tasks=may_restart_tasks)
    with pytest.warns(
        UserWarning, match=r"worker:1 was lost in the middle of an update; resuming from .*ckpt-40 \(1 of 3"
    ):
        run_all(session)
    assert (session.global_step, len(made)) == (100, 1)
    assert session.restarts == {"worker": 0, "cluster": 0}


def test_torn_updates_are_borne_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingStrategy, "error", TornUpdateError("worker:1 was lost in the middle of an update"))
    session, made = session_that_fails({40, 60}, savers(), max_restarts=1)
    with pytest.warns(UserWarning, match="1 of 1"), pytest.raises(TornUpdateError):
        run_all(session)
    assert len(made) == 1


def test_tasks_of_others_are_not_started_again() -> None:
    session, made = session_that_fails({60}, savers(), may_restart_tasks=False)
    with pytest.raises(ClusterError, match="ps:0 is lost"):
        run_all(session)
    assert len(made) == 1


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_so_often_and_no_more(max_restarts: int) -> None:
    session, made = session_that_fails({40, 60, 80}, savers(), max_restarts=max_restarts)
    said = pytest.warns(UserWarning, match=f"{max_restarts} of {max_restarts}") if max_restarts else nullcontext()
    with said, pytest.raises(ClusterError, match="ps:0 is lost"):
        run_all(session)
    assert len(made) == 1 + max_restarts
    assert all(strategy.stopped for strategy in made)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to() -> None:
    session, made = session_that_fails({16}, [StopAtStep(last_step=100)])
    with pytest.raises(ClusterError, match="ps:0 is lost"):
        run_all(session)
    assert len(made) == 1


def test_a_cluster_that_fails_at_the_last_save_trains_to_its_step_again() -> None:
    session, made = session_that_fails({50}, savers(last_step=50), fail_in="save")
    with pytest.warns(UserWarning, match="ckpt-40"):
        run_all(session)
    assert (session.global_step, session.stopped_by) == (50, "StopAtStep")
    assert session.checkpoints.saved[-1] == 50  # type: ignore[attr-defined]
    assert made[1].runs == [10]


def test_what_a_hook_raises_is_no_fault_of_the_cluster() -> None:
    session, made = session_that_fails(set(), [Recorder(raise_in="after_run"), *savers()])
    with pytest.raises(RuntimeError, match="in after_run"):
        run_all(session)
    assert len(made) == 1


def test_a_run_that_is_told_to_end_starts_nothing_again() -> None:
    session, made = session_that_fails({60}, savers())
    with session:
        while session.global_step < 40:
            session.run()
        session.interrupt("SIGTERM")
        with pytest.raises(ClusterError, match="ps:0 is lost"):
            session._go_back(ClusterError("ps:0 is lost"))
    assert len(made) == 1
