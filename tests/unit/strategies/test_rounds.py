"""Rounds of all-reduce workers: what the chief tells, and for whom it waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kdist.cluster.spec import ClusterShape, ClusterSpec, Membership, Task
from kdist.config.schema import ClusterConfig
from kdist.data.epoch_lengths import EpochCount, EpochLengths
from kdist.errors import ClusterError, NoWorkersError
from kdist.strategies import rounds
from kdist.strategies.rounds import ChiefsRounds, Round

_WORKERS = [Task("worker", index) for index in range(3)]


@pytest.mark.parametrize("lengths", [None, EpochLengths(7, 20, first_step=3)])
def test_a_round_arrives_as_it_was_sent(lengths: EpochLengths | None) -> None:
    sent = Round(4, {0: "a:1", 2: "c:1"}, 3, 2, 17, EpochCount(1, 2, 3), lengths)
    assert Round.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


class Board:
    """A cluster of three workers, some of which report at a time, and a clock that goes on when somebody waits."""

    def __init__(self, reports: dict[int, float]) -> None:
        self.spec = ClusterSpec((), ("a:1", "b:1", "c:1"))
        self.now = 0.0
        self._reports = reports

    def waiting(self) -> set[Task]:
        return {_WORKERS[index] for index, when in self._reports.items() if when <= self.now}

    def lost_tasks(self) -> dict[Task, str]:
        return {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, secs: float) -> None:
        self.now += secs


@pytest.fixture
def chief(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ChiefsRounds, Board]]:
    def make(reports: dict[int, float], **config: Any) -> tuple[ChiefsRounds, Board]:
        board = Board(reports)
        monkeypatch.setattr(rounds, "time", board)
        given = ClusterConfig(**{"patience": 10.0, "patience_for_workers": 60.0, **config})
        made = ChiefsRounds(Membership(board.spec, _WORKERS[0]), given, None)
        made.cluster = board  # type: ignore[assignment]
        return made, board

    return make


def test_nothing_is_waited_for_when_all_have_returned(chief: Any) -> None:
    made, board = chief({1: 0.0, 2: 4.0})
    assert made.regroup(lambda: False).leaving == []
    assert board.now == pytest.approx(4, abs=0.1)


def test_one_that_does_not_return_is_left_out_after_patience(chief: Any) -> None:
    made, board = chief({1: 0.0, 2: 11.0})
    with pytest.warns(UserWarning, match=r"worker:2 is lost, and not back after 10 s \(cluster.patience\)"):
        resize = made.regroup(lambda: False)
    assert (resize.after, resize.leaving) == (ClusterShape(0, 2), [_WORKERS[2]])
    assert board.now == pytest.approx(10, abs=0.1)


def test_too_few_workers_wait_for_longer_and_then_end(chief: Any) -> None:
    made, _ = chief({1: 0.0, 2: 50.0}, min_workers=3)
    assert made.regroup(lambda: False).leaving == []
    made, board = chief({1: 0.0}, min_workers=3)
    with pytest.raises(NoWorkersError, match=r"2 of at least 3 workers \(cluster.min_workers\) are left"):
        made.regroup(lambda: False)
    assert board.now == pytest.approx(60, abs=0.1)


def test_an_interrupted_run_does_not_wait(chief: Any) -> None:
    made, board = chief({1: 0.0})
    with pytest.raises(ClusterError, match="interrupted while worker:2 did not respond"):
        made.regroup(lambda: board.now > 2)
    assert board.now < 3


def test_tasks_that_do_not_report_in_time_are_named(chief: Any) -> None:
    made, _ = chief({1: 0.0}, step_timeout=5.0)
    with pytest.raises(ClusterError, match=r"worker:2 did not respond within 5 s \(cluster.step_timeout\)"):
        made.wait_for(_WORKERS)
