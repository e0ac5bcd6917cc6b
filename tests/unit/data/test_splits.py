"""Splits are handed out once, come back when their worker is lost, and are waited for within limits."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from kdist.data.splits import NothingToRead, Split, SplitEnumerator, SplitQueue, UnreadableSplit
from kdist.errors import ConfigError, DataSourceError


class Listed(SplitEnumerator):
    """Finds what a test puts into `there`."""

    place = "here"
    poll_secs = 1.0
    idle_secs = 60.0

    def __init__(self, *there: str) -> None:
        self.there = list(there)
        self.found: list[str] = []
        self.looks = 0
        self.ended: str | None = None
        self.error: OSError | None = None
        self.wrong: dict[str, Exception] = {}

    def discover(self) -> list[str]:
        self.looks += 1
        if self.error:
            raise self.error
        new = [name for name in self.there if name not in self.found]
        self.found += new
        return new

    @property
    def ended_by(self) -> str | None:
        return self.ended

    def check(self, name: str) -> None:
        if name in self.wrong:
            raise self.wrong[name]

    def state(self) -> Any:
        return self.found

    def restore(self, state: Any) -> None:
        self.found = list(state)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, secs: float) -> None:
        assert secs <= 1.0
        self.now += secs


def queue_of(*names: str) -> tuple[SplitQueue, Listed, Clock]:
    clock, listed = Clock(), Listed(*names)
    queue = SplitQueue(listed, batch_size=10, clock=clock, pause=clock.pause)
    queue.look()
    return queue, listed, clock


def test_each_split_goes_to_one_worker_and_stays_with_it_until_it_is_read() -> None:
    queue, _, _ = queue_of("a", "b")
    assert [queue.assign(0).name, queue.assign(1).name, queue.assign(0).name] == ["a", "b", "a"]
    with pytest.raises(NothingToRead):
        queue.assign(2)
    queue.finish(0)
    with pytest.raises(NothingToRead):
        queue.assign(0)


def test_the_split_of_a_lost_worker_is_the_next_from_where_it_was() -> None:
    queue, _, _ = queue_of("a", "b", "c")
    queue.assign(0)
    queue.advance(0)
    queue.advance(0)
    queue.give_back(0)
    assert queue.assign(1) == Split("a", 20)
    # What the lost worker still says does not count.
    queue.advance(0)
    queue.finish(0)
    assert queue.assign(0).name == "b"
    assert queue.num_batches(0) == 2


def test_losses_of_readers_count_in_a_row_at_about_the_same_place() -> None:
    queue = SplitQueue(Listed("a", "b"), 10)
    assert [queue.count_loss(Split("a", place)) for place in (40, 40, 140, 250, 250)] == [1, 2, 3, 1, 2]
    assert queue.count_loss(Split("b", 250)) == 1


def test_a_restored_queue_continues_with_what_was_not_read() -> None:
    queue, _, _ = queue_of("a", "b", "c")
    queue.assign(0)
    queue.finish(0)
    queue.assign(0)
    queue.advance(0)
    state = queue.state()
    assert json.loads(state) == {"found": ["a", "b", "c"], "unread": [["b", 10], ["c", 0]]}
    again, listed, _ = queue_of()
    again.restore(state)
    listed.there = ["a", "b", "c", "d"]
    assert [again.assign(0), again.assign(1)] == [Split("b", 10), Split("c")]
    assert again.look()
    assert again.assign(2) == Split("d")


def test_restoring_takes_the_splits_of_all_workers_back() -> None:
    queue, _, _ = queue_of("a", "b")
    state = queue.state()
    queue.assign(0)
    queue.advance(0)
    queue.restore(state)
    assert queue.split_of(0) is None
    assert queue.assign(1) == Split("a")


def test_the_source_is_looked_at_only_when_nothing_waits_and_not_too_often() -> None:
    queue, listed, clock = queue_of("a")
    assert [queue.look(), queue.look(), listed.looks] == [True, True, 1]
    queue.assign(0)
    assert not queue.look()
    assert listed.looks == 1
    clock.now = 1.0
    assert not queue.look()
    assert listed.looks == 2


def test_an_unreadable_split_costs_a_warning_and_the_next_one_is_read() -> None:
    queue, listed, _ = queue_of("a", "b")
    listed.wrong["a"] = UnreadableSplit("it was removed")
    with pytest.warns(UserWarning, match="^kdist: a: cannot be read and is skipped: it was removed$"):
        assert queue.assign(0).name == "b"
    queue.advance(0)
    with pytest.warns(UserWarning, match="^kdist: b: what follows 10 records cannot be read and is skipped: torn$"):
        queue.skip(0, "torn")
    assert json.loads(queue.state())["unread"] == []


def test_a_split_that_does_not_fit_ends_training() -> None:
    queue, listed, _ = queue_of("a")
    listed.wrong["a"] = ConfigError("another schema")
    with pytest.raises(ConfigError, match="another schema"):
        queue.assign(0)


def test_waiting_ends_after_idle_secs_which_count_from_the_last_split() -> None:
    queue, listed, clock = queue_of("a")
    queue.assign(0)
    queue.finish(0)
    while queue.wait() is None:
        if clock.now == 50.0 and len(listed.there) == 1:
            listed.there.append("b")
        if queue.look():
            queue.assign(0)
            queue.finish(0)
    assert queue.wait() == "here, where nothing arrived for 60 s"
    assert 110.0 <= clock.now <= 112.0


def test_waiting_ends_at_once_when_nothing_more_will_come() -> None:
    queue, listed, clock = queue_of()
    listed.ended = "here/_END"
    assert queue.wait() == "here/_END"
    assert clock.now == 0.0


def test_nothing_ends_while_a_worker_that_does_not_respond_has_a_split() -> None:
    queue, listed, clock = queue_of("a")
    queue.assign(0)
    listed.ended = "here/_END"
    for _ in range(100):
        assert queue.wait() is None
    assert clock.now == 100.0
    queue.give_back(0)
    assert queue.wait() is None
    queue.assign(1)
    queue.finish(1)
    assert queue.wait() == "here/_END"


def test_a_source_that_cannot_be_reached_is_told_once_and_fails_after_idle_secs() -> None:
    queue, listed, clock = queue_of()
    listed.error = OSError("gone")
    clock.now = 5.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while clock.now < 65.0:
            assert queue.wait() is None
        with pytest.raises(DataSourceError) as raised:
            queue.wait()
    assert [str(warning.message) for warning in caught] == ["kdist: here cannot be read at present: gone; trying again"]
    assert str(raised.value) == "here could not be read for 60 s (idle_secs): gone"
    assert raised.value.exit_code == 75


def test_a_source_that_is_back_continues() -> None:
    queue, listed, clock = queue_of()
    listed.error = OSError("gone")
    clock.now = 5.0
    with pytest.warns(UserWarning, match="gone"):
        assert queue.wait() is None
    listed.error, listed.there = None, ["a"]
    clock.now = 30.0
    assert queue.wait() is None
    assert queue.assign(0).name == "a"
