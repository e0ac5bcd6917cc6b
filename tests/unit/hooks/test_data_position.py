"""The place at which the data of a session begins, and the end of the session with it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kdist.hooks.data_position import DataPosition


class Splits:
    """Records what it is told."""

    place = "here"
    pass_through_chief = True

    def __init__(self) -> None:
        self.restored: list[str | None] = []
        self.ended_by: str | None = None
        self.is_closed = False

    def begin(self, interrupted: Any) -> None:
        self.interrupted = interrupted

    def restore(self, state: str | None) -> None:
        self.restored.append(state)

    def wait(self) -> str | None:
        return self.ended_by

    def close(self) -> None:
        self.is_closed = True


def session_at(step: int, *, has_workers: bool = False) -> Any:
    reasons: list[str] = []
    return SimpleNamespace(
        global_step=step,
        interrupted=False,
        strategy=SimpleNamespace(has_workers=has_workers),
        reasons=reasons,
        request_stop=reasons.append,
        checkpoints=SimpleNamespace(data_state=lambda step: f"state of {step}"),
    )


def test_a_resumed_run_continues_where_its_checkpoint_was() -> None:
    splits: Any = Splits()
    hook = DataPosition(splits, resumes=True)
    hook.after_create_session(session_at(7))
    hook.after_create_session(session_at(5))
    assert splits.restored == ["state of 7", "state of 5"]


def test_a_later_fit_begins_anew_and_goes_back_to_its_own_checkpoints_only() -> None:
    splits: Any = Splits()
    hook = DataPosition(splits, resumes=False)
    hook.after_create_session(session_at(7))
    assert splits.restored == []
    hook.after_create_session(session_at(9))
    hook.after_create_session(session_at(7))
    assert splits.restored == ["state of 9", None]


def test_training_ends_with_the_data_and_a_warning() -> None:
    splits: Any = Splits()
    hook, session = DataPosition(splits, resumes=False), session_at(7)
    hook.while_waiting(session)
    assert session.reasons == []
    splits.ended_by = "the generator, which ran out of data"
    with pytest.warns(UserWarning, match="training ends at step 7 with the generator, which ran out of data"):
        hook.while_waiting(session)
    assert session.reasons == [splits.ended_by]
    hook.close()
    assert splits.is_closed


def test_what_the_chief_has_to_read_for_workers_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.hooks.data_position._warned_of", set())
    session = session_at(0, has_workers=True)
    splits: Any = Splits()
    with pytest.warns(UserWarning, match="here is read in this process, which sends every batch to the workers"):
        DataPosition(splits, resumes=False).begin(session)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataPosition(splits, resumes=False).begin(session)
    session.interrupted = True
    assert splits.interrupted()
