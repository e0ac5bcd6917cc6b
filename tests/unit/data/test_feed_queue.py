"""The batches that a thread makes: who gets them, how many are made ahead, and what happens when one does not come."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import wait_until

from kdist.data.base import Readers
from kdist.data.fed_data import FeedQueue
from kdist.data.splits import NothingToRead
from kdist.errors import TaskError


class Source:
    """Makes batches of one number."""

    name = "the source"

    def __init__(self, size: int = 4, *, repeats: bool = True, fails_at: int | None = None) -> None:
        self.size, self.repeats, self.fails_at = size, repeats, fails_at
        self.num_made = self.num_stops = 0
        self.num_passes = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def reset(self) -> None:
        pass

    def stop(self) -> None:
        self.num_stops += 1

    def one_pass(self, pass_number: int, first: int) -> Iterator[tuple[int, list[int] | None]]:
        self.num_passes += 1
        for number in range(self.size):
            self.may_go_on.wait(10)
            if number == self.fails_at:
                raise TaskError("chief", LookupError("gone"), where=self.name)
            self.num_made += 1
            yield number, [number] if number >= first else None


@pytest.fixture
def queue_of() -> Iterator[Any]:
    made: list[FeedQueue] = []

    def make(source: Any, clock: Any = None, **readers: Any) -> FeedQueue:
        clocks = {} if clock is None else {"clock": clock}
        made.append(FeedQueue(source, Readers(**readers), **clocks))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def read(queue: FeedQueue, worker: int = 0) -> Any:
    """The number of the next batch of a worker, which uses it."""
    (number,) = queue.assign(worker).tensors
    queue.advance(worker)
    return number


def test_each_batch_goes_to_one_reader_in_their_order_and_passes_follow_each_other(queue_of: Any) -> None:
    source = Source()
    queue = queue_of(source, number=2)
    assert [read(queue, worker) for worker in (0, 1, 0, 0, 1, 1)] == [0, 1, 2, 3, 0, 1]
    assert (queue.num_batches(0), queue.num_batches(1)) == (3, 3)
    assert queue.look()
    assert not queue.pass_has_ended()


def test_a_pass_begins_only_when_somebody_asks_for_it(queue_of: Any) -> None:
    source = Source()
    queue = queue_of(source)
    assert [read(queue) for _ in range(4)] == [0, 1, 2, 3]
    assert source.num_passes == 1
    assert read(queue) == 0
    assert source.num_passes == 2


def test_no_more_are_made_ahead_than_twice_the_readers(queue_of: Any) -> None:
    source = Source(100)
    queue = queue_of(source, number=3)
    assert read(queue) == 0
    wait_until(lambda: source.num_made >= 7, 10, "it is full")
    assert source.num_made == 7


def test_by_passes_readers_wait_for_the_next_one(queue_of: Any) -> None:
    queue = queue_of(Source(2), number=2, by_passes=True)
    assert [read(queue), read(queue)] == [0, 1]
    with pytest.raises(NothingToRead):
        queue.assign(0)
    assert queue.pass_has_ended()
    assert not queue.look()
    assert queue.wait() is None
    queue.begin_pass()
    assert (queue.first_epoch, queue.look(), read(queue, 1)) == (1, True, 0)


def test_a_batch_of_a_lost_worker_is_the_next_one(queue_of: Any) -> None:
    queue = queue_of(Source(2), number=2, by_passes=True)
    assert [queue.assign(0).tensors, read(queue, 1)] == [(0,), 1]
    assert not queue.pass_has_ended()
    queue.give_back(0)
    assert read(queue, 1) == 0
    queue.advance(0)
    assert queue.num_batches(0) == 0


def test_what_can_be_read_once_ends_training(queue_of: Any) -> None:
    queue = queue_of(Source(2, repeats=False))
    assert [read(queue), read(queue)] == [0, 1]
    with pytest.raises(NothingToRead):
        queue.assign(0)
    assert (queue.look(), queue.wait()) == (False, "the source, which ran out of data")


def test_steps_that_take_several_do_not_begin_with_fewer(queue_of: Any) -> None:
    queue = queue_of(Source(3), at_once=2, by_passes=True)
    assert queue.look()
    assert [read(queue, 0), read(queue, 1)] == [0, 1]
    assert not queue.look()
    assert queue.pass_has_ended()
    queue.begin_pass()
    # What was left begins the next pass.
    assert queue.look()
    assert [read(queue, 0), read(queue, 1)] == [2, 0]


def test_an_error_comes_after_the_batches_before_it(queue_of: Any) -> None:
    queue = queue_of(Source(fails_at=2))
    assert [read(queue), read(queue)] == [0, 1]
    for _ in range(2):
        with pytest.raises(TaskError, match="^chief: the source: LookupError: gone"):
            queue.assign(0)
    with pytest.raises(TaskError):
        queue.wait()


def test_data_without_a_batch_is_an_error(queue_of: Any) -> None:
    with pytest.raises(TaskError, match="the source: ValueError: has not a single batch"):
        queue_of(Source(0)).assign(0)


def test_nobody_waits_for_ever(queue_of: Any) -> None:
    source = Source()
    source.may_go_on.clear()
    seconds = itertools.count(0, 100)
    queue = queue_of(source, clock=lambda: next(seconds), timeout=250)
    with pytest.raises(TaskError, match=r"the source: TimeoutError: made no batch for 250 s \(cluster.step_timeout\)"):
        queue.assign(0)
    queue.begin(lambda: True)
    with pytest.raises(NothingToRead):
        queue.assign(0)
    source.may_go_on.set()


def test_it_continues_where_its_state_was(queue_of: Any) -> None:
    source = Source()
    queue = queue_of(source, number=2)
    assert [read(queue) for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    assert queue.assign(1).tensors == (2,)
    state = queue.state()
    assert json.loads(state) == {"pass": 1, "batch": 2}
    other = queue_of(Source())
    other.restore(state)
    assert [read(other) for _ in range(3)] == [2, 3, 0]
    assert other.first_epoch == 2
    other.restore(None)
    assert (read(other), other.first_epoch) == (0, 0)


def test_the_state_after_a_whole_pass_is_the_beginning_of_the_next(queue_of: Any) -> None:
    queue = queue_of(Source(2), by_passes=True)
    assert [read(queue), read(queue)] == [0, 1]
    wait_until(queue.pass_has_ended, 10, "it has")
    assert json.loads(queue.state()) == {"pass": 1, "batch": 0}


def test_a_generator_goes_on_after_a_failure_of_the_cluster(queue_of: Any) -> None:
    queue = queue_of(Source(5, repeats=False), number=2)
    assert (read(queue), queue.assign(0).tensors, queue.assign(1).tensors) == (0, (1,), (2,))
    queue.restore('{"pass": 0, "batch": 0}')
    assert [read(queue) for _ in range(4)] == [1, 2, 3, 4]


def test_closing_ends_the_thread_and_what_it_uses(queue_of: Any) -> None:
    source = Source(100)
    queue = queue_of(source)
    read(queue)
    queue.close()
    assert source.num_stops == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "kdist-feed"]
