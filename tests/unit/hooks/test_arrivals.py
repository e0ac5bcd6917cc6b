"""Sessions while there is nothing to read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kdist.hooks.data_position import Arrivals


class Waited:
    """Stands for splits, all of which are read."""

    place = "here"
    idle_secs = 600.0

    def __init__(self) -> None:
        self.ended_by: str | None = None
        self.restored: list[str] = []

    def wait(self) -> str | None:
        return self.ended_by

    def restore(self, state: str) -> None:
        self.restored.append(state)


def session_of(lines: list[str], state: str | None = None) -> Any:
    reasons: list[str] = []
    return SimpleNamespace(
        global_step=7,
        last_step=None,
        print_line=lines.append,
        reasons=reasons,
        request_stop=reasons.append,
        checkpoints=SimpleNamespace(data_state=lambda step: state if step == 7 else None),
    )


def test_waiting_is_told_once_a_minute_at_most_and_once_for_each_wait() -> None:
    lines: list[str] = []
    session, clock = session_of(lines), SimpleNamespace(now=0.0)
    hook: Any = Arrivals(Waited(), clock=lambda: clock.now)  # type: ignore[arg-type]
    for clock.now in (0.0, 100.0, 200.0):
        hook.while_waiting(session)
    assert lines == ["wait  | step      7 | here: all data read; waiting up to 600 s for more"]
    hook.after_run(None, None)
    hook.while_waiting(session)
    assert len(lines) == 2
    hook.after_run(None, None)
    clock.now = 230.0
    hook.while_waiting(session)
    assert len(lines) == 2


def test_the_session_ends_when_nothing_more_comes() -> None:
    session, splits = session_of([]), Waited()
    hook: Any = Arrivals(splits)  # type: ignore[arg-type]
    hook.while_waiting(session)
    assert session.reasons == []
    splits.ended_by = "here/_END"
    hook.while_waiting(session)
    assert session.reasons == ["here/_END"]


def test_reading_continues_where_the_checkpoint_of_the_step_was() -> None:
    for state, restored in (("that", ["that"]), (None, [None])):
        splits = Waited()
        Arrivals(splits).after_create_session(session_of([], state))  # type: ignore[arg-type]
        assert splits.restored == restored
