"""The number of steps that a call unrolls, and the calls that read the splits of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from kdist.config.scheduler import secs_for_calls
from kdist.data.files import RangeQueue
from kdist.data.splits import NothingToRead
from kdist.strategies.call_sizer import CallSizer
from kdist.strategies.calls import WorkerIterators


def trained(sizer: CallSizer, secs: float, rate: float) -> None:
    """`secs` of training in runs of 0.1 s."""
    for _ in range(round(secs / 0.1)):
        sizer.observe(max(1, round(0.1 * rate)), 0.1, warming_up=False)


@pytest.mark.parametrize(("remaining", "size"), [(100, 7), (7, 7), (6, 4), (1, 1)])
def test_a_fixed_number_is_kept_but_for_what_remains(remaining: int, size: int) -> None:
    assert CallSizer(7, num_workers=4).next_size(remaining) == size


def test_sizes_are_few_and_add_up() -> None:
    sizer = CallSizer(100, num_workers=1)
    remaining, sizes = 77, []
    while remaining:
        sizes.append(sizer.next_size(remaining))
        remaining -= sizes[-1]
    assert sizes == [64, 4, 4, 4, 1]


def test_auto_leaves_single_steps_once_training_has_taken_as_long_as_tracing_did() -> None:
    sizer = CallSizer(None, num_workers=1)
    sizer.observe(16, 1.0, warming_up=True)
    trained(sizer, 0.8, rate=100)
    assert sizer.steps_per_call == 1
    trained(sizer, 0.3, rate=100)
    assert sizer.steps_per_call == 4


@pytest.mark.parametrize(("last_step", "size"), [(None, 1), (500, 1), (5_000, 4)])
def test_auto_leaves_single_steps_at_once_if_many_are_left(last_step: int | None, size: int) -> None:
    sizer = CallSizer(None, num_workers=1, last_step=last_step)
    sizer.observe(16, 1.0, warming_up=True)
    trained(sizer, 0.1, rate=100)
    assert sizer.steps_per_call == size


def test_auto_keeps_calls_of_slow_models_short() -> None:
    sizer = CallSizer(None, num_workers=4)
    sizer.observe(1, 0.1, warming_up=True)
    trained(sizer, 60, rate=10)
    assert sizer.steps_per_call == 1


def grown_to_16(
    last_step: int | None = None, *, num_workers: int = 1, cost: float = 1.0, prepare_secs: float = 10.0
) -> CallSizer:
    """A sizer that has seen single steps at 100/s, then 200/s, and then that calls of 16 cost `cost` seconds."""
    sizer = CallSizer(None, num_workers, last_step, prepare_secs)
    sizer.observe(1, 0.1, warming_up=True)
    trained(sizer, 0.1, rate=100)
    sizer.observe(4, 0.1, warming_up=True)
    while sizer.steps_per_call < 16:
        trained(sizer, 0.1, rate=200)
    sizer.observe(16, cost, warming_up=True)
    return sizer


def test_auto_grows_when_larger_calls_would_have_saved_what_they_cost() -> None:
    sizer = grown_to_16()
    # From 200/s to 250/s 1 ms a step was saved: with 64 steps a call a quarter of that will be, and will cost 4 s.
    trained(sizer, 60, rate=250)
    assert sizer.steps_per_call == 16
    trained(sizer, 5, rate=250)
    assert sizer.steps_per_call == 64


@pytest.mark.parametrize(("last_step", "size"), [(10_000, 16), (20_000, 64)])
def test_auto_grows_at_once_if_what_is_left_to_train_will_save_the_cost(last_step: int, size: int) -> None:
    sizer = grown_to_16(last_step)
    trained(sizer, 1.5, rate=250)
    assert sizer.steps_per_call == size


def test_auto_counts_what_is_left_from_where_a_resumed_run_begins() -> None:
    sizer = grown_to_16(20_000)
    sizer.begin_at(15_000)
    trained(sizer, 1.5, rate=250)
    assert sizer.steps_per_call == 16


@pytest.mark.parametrize(
    ("grace_secs", "cost", "size"), [(20.0, 2.0, 64), (20.0, 3.0, 16), (30.0, 3.0, 64), (30.0, 4.0, 16)]
)
def test_auto_prepares_no_call_for_longer_than_a_signal_can_wait(grace_secs: float, cost: float, size: int) -> None:
    sizer = grown_to_16(10_000_000, cost=cost, prepare_secs=secs_for_calls(grace_secs))
    trained(sizer, 5, rate=250)
    assert sizer.steps_per_call == size


@pytest.mark.parametrize(
    ("trace_secs", "shares_step", "size"), [(0.5, False, 4), (2.0, False, 4), (2.0, True, 1), (8.0, False, 1)]
)
def test_auto_scales_only_the_part_of_the_cost_that_depends_on_the_steps(
    trace_secs: float, shares_step: bool, size: int
) -> None:
    sizer = CallSizer(None, num_workers=1, last_step=100_000, prepare_secs=10.0)
    sizer.go_by({1: trace_secs}, shares_step=shares_step)
    # Most of what a first call costs on a busy machine is the same for four steps.
    sizer.observe(1, 6.0, warming_up=True)
    trained(sizer, 0.1, rate=100)
    assert sizer.steps_per_call == size


@pytest.mark.parametrize(("last_step", "size"), [(1_000, 1), (1_500, 4)])
def test_auto_leaves_single_steps_at_once_if_what_is_left_takes_as_long_as_two_more_sizes(
    last_step: int, size: int
) -> None:
    sizer = CallSizer(None, num_workers=1, last_step=last_step)
    sizer.go_by({1: 1.0}, shares_step=False)
    # 2 + 3 * 0.5 s for four steps, and 2 + 15 * 0.5 s for 16.
    sizer.observe(16, 2.0, warming_up=True)
    trained(sizer, 0.1, rate=100)
    assert sizer.steps_per_call == size


def test_auto_counts_what_the_last_change_of_the_cluster_cost_and_not_all_of_them() -> None:
    sizer = grown_to_16(10_000_000, cost=2.0)
    for again in (lambda: sizer.resize(1), sizer.prepare_again, sizer.prepare_again):
        again()
        sizer.observe(16, 2.0, warming_up=True)
    trained(sizer, 5, rate=250)
    assert sizer.steps_per_call == 64


def test_auto_knows_that_calls_of_more_tasks_take_longer_to_prepare() -> None:
    sizer = grown_to_16(10_000_000, cost=2.0)
    sizer.resize(1)
    sizer.observe(16, 3.0, warming_up=True)
    trained(sizer, 5, rate=250)
    assert sizer.steps_per_call == 16


# On one worker, calls of four made 200 steps/s.
@pytest.mark.parametrize(("before", "size"), [(201, 16), (250, 64)])
# Two may be twice as fast, or no faster, as on the same core.
@pytest.mark.parametrize("times_faster", [1, 1.5, 2])
def test_auto_compares_a_size_with_the_one_before_as_they_were_on_as_many_workers(
    before: int, size: int, times_faster: float
) -> None:
    # A hundred seconds are left.
    sizer = grown_to_16(int(100 * before * times_faster))
    trained(sizer, 0.5, rate=before)
    sizer.resize(2)
    sizer.resize(2)
    sizer.observe(16, 1.0, warming_up=True)
    trained(sizer, 2, rate=before * times_faster)
    assert sizer.steps_per_call == size


def test_auto_tries_a_larger_size_if_the_cluster_changes_before_the_present_one_is_known() -> None:
    sizer = grown_to_16(1_000_000)
    sizer.resize(2)
    sizer.observe(16, 1.0, warming_up=True)
    trained(sizer, 0.5, rate=200)
    assert sizer.steps_per_call == 16
    trained(sizer, 1.0, rate=200)
    assert sizer.steps_per_call == 64


def test_auto_keeps_a_size_that_brought_nothing() -> None:
    sizer = grown_to_16()
    trained(sizer, 1000, rate=199)
    assert sizer.steps_per_call == 16


def test_auto_gives_every_worker_its_share_near_the_end() -> None:
    sizer = grown_to_16(num_workers=4)
    assert [sizer.next_size(remaining) for remaining in (100, 60, 16, 4)] == [16, 4, 4, 1]


@pytest.mark.parametrize(
    ("num_workers", "rate", "size"),
    [
        # Steps of 0.5 s; one core of the chief makes 500 calls a second.
        (64, 128, 1),
        (512, 500, 4),
        (512, 1_000, 4),
        # Steps of 4 s.
        (512, 128, 1),
    ],
)
def test_auto_takes_longer_calls_where_one_chief_has_hardly_time_for_all_workers(
    num_workers: int, rate: float, size: int
) -> None:
    sizer = CallSizer(None, num_workers, 100_000)
    sizer.observe(num_workers, 0.1, warming_up=True)
    trained(sizer, 1.0, rate)
    assert sizer.steps_per_call == size


def test_auto_takes_no_longer_calls_once_the_chief_has_time() -> None:
    sizer = CallSizer(None, 512, 1_000_000)
    sizer.observe(512, 0.1, warming_up=True)
    trained(sizer, 1.0, 500)
    sizer.observe(512, 0.1, warming_up=True)
    trained(sizer, 100.0, 1_000)
    assert sizer.steps_per_call == 4


def test_auto_goes_by_the_time_that_steps_take_and_not_by_when_they_were_asked_for() -> None:
    sizer = CallSizer(None, num_workers=1)
    sizer.observe(1, 1.0, warming_up=True)
    # Steps of 0.3 s, of which ten arrive at once.
    for _ in range(20):
        sizer.observe(0, 2.999, warming_up=False)
        sizer.observe(10, 0.001, warming_up=False)
    assert sizer.steps_per_call == 1


def read_range(queue: RangeQueue, worker: int) -> Iterator[int]:
    split = queue.assign(worker)
    _, begin, end = queue.range_of(split)
    return iter(range(begin + split.num_read, end))


def take(num_steps: int, numbers: Iterator[int]) -> np.ndarray:
    return np.array([[next(numbers)] for _ in range(num_steps)])


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> RangeQueue:
    queue = RangeQueue(40, num_workers=1, batch_size=1)
    monkeypatch.setattr(queue, "_ranges", lambda: ["epoch 0, records 0 to 7", "epoch 0, records 7 to 9"])
    assert queue.look()
    return queue


@pytest.fixture
def iterators(queue: RangeQueue, monkeypatch: pytest.MonkeyPatch) -> WorkerIterators:
    monkeypatch.setattr("kdist.strategies.calls.iterator_over", lambda made: made)
    return WorkerIterators(partial(read_range, queue))


CALLS = {1: partial(take, 1), 4: partial(take, 4)}


def test_smaller_calls_read_the_end_of_a_split_and_the_next_one(queue: RangeQueue, iterators: WorkerIterators) -> None:
    read = [iterators.read_steps(0, queue, CALLS, 4).ravel().tolist() for _ in range(3)]
    # The last one has fewer: no split follows.
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    with pytest.raises(NothingToRead):
        iterators.read_steps(0, queue, CALLS, 4)


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_steps_before_a_worker_was_lost_are_counted(
    queue: RangeQueue, iterators: WorkerIterators, is_lost: bool
) -> None:
    error = (tf.errors.UnavailableError if is_lost else tf.errors.InvalidArgumentError)(None, None, "why")

    def take_one(numbers: Iterator[int]) -> np.ndarray:
        if (row := take(1, numbers))[0, 0] == 6:
            raise error
        return row

    calls = {**CALLS, 1: take_one}
    iterators.read_steps(0, queue, calls, 4)
    if is_lost:
        assert iterators.read_steps(0, queue, calls, 4).ravel().tolist() == [4, 5]
        # Another worker continues there.
        assert queue.assign(0).num_read == 6
    else:
        with pytest.raises(tf.errors.InvalidArgumentError):
            iterators.read_steps(0, queue, calls, 4)


def test_what_a_cancelled_call_has_read_is_read_again(queue: RangeQueue, iterators: WorkerIterators) -> None:
    was_cancelled: list[np.ndarray] = []

    def take_four(numbers: Iterator[int]) -> np.ndarray:
        rows = take(4, numbers)
        if not was_cancelled:
            was_cancelled.append(rows)
            raise tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled")
        return rows

    with pytest.raises(tf.errors.CancelledError):
        iterators.read_steps(0, queue, {4: take_four}, 4)
    assert iterators.read_steps(0, queue, {4: take_four}, 4).ravel().tolist() == [0, 1, 2, 3]
