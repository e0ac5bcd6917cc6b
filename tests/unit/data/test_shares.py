"""Shares of data that any number of workers read: each batch once in every epoch."""

import random
from collections import Counter

import pytest

from kdist.data.shares import DealtShares, ShareQueue, place_in, shares_in
from kdist.data.splits import NothingToRead

SHARES, BATCHES = 3, 67
#: Of a share in an epoch, whose ranges do not span another one.
MANY = 600


def queue(begins: list[int] | None = None, *, mixes_epochs: bool = True, batches: int = BATCHES) -> ShareQueue:
    return ShareQueue(
        lambda _, passes: passes * batches, SHARES, begins or [0] * SHARES, lambda step: step, mixes_epochs=mixes_epochs
    )


def read(splits: ShareQueue, worker: int, most: int, seen: Counter[tuple[int, int]]) -> int:
    """Reads as a call of a worker does, and counts the batches."""
    number = splits.reserve(worker, most)
    split = splits.split_of(worker)
    assert split is not None
    _, share, begin, _ = splits.range_of(split)
    seen.update((share, begin + split.num_read + i) for i in range(number))
    splits.advance(worker, number)
    return number


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("batches", "epochs"), [(1, 700), (8, 100), (BATCHES, 4), (MANY, 2)])
def test_workers_that_come_and_go_read_each_batch_once_in_every_epoch(batches: int, epochs: int, seed: int) -> None:
    rng, splits, seen = random.Random(seed), queue(batches=batches), Counter[tuple[int, int]]()
    workers = [0, 1, 2]
    left = last_step = splits.last_step = epochs * SHARES * batches
    splits.begin_to_count(0)
    while left:
        if rng.random() < 0.05:
            gone = workers.pop(rng.randrange(len(workers))) if len(workers) > 1 and rng.random() < 0.5 else None
            if gone is None:
                workers.append(max(workers) + 1)
            else:
                if rng.random() < 0.5:
                    # In the middle of a call.
                    splits.reserve(gone, min(left, 16))
                splits.give_back(gone)
        if rng.random() < 0.02:
            # A run that is resumed.
            state, splits = splits.state(), queue(batches=batches)
            splits.last_step = last_step
            splits.restore_at(last_step - left, state)
        # A call takes as many as it has steps, or to the end of its range.
        left -= read(splits, rng.choice(workers), min(left, rng.choice([1, 4, 16])), seen)

    assert set(seen.values()) == {1}
    assert seen.keys() == {(share, batch) for share in range(SHARES) for batch in range(epochs * batches)}


@pytest.mark.parametrize("batches", [1, 4, BATCHES])
@pytest.mark.parametrize("gone", [[], [2], [0, 1]])
def test_fewer_workers_than_shares_read_all_shares_at_the_same_pace(gone: list[int], batches: int) -> None:
    rng, splits, seen = random.Random(1), queue(batches=batches), Counter[tuple[int, int]]()
    # From the beginning, or when some are lost.
    workers = [0] if not gone else [worker for worker in range(SHARES) if worker not in gone]
    left = splits.last_step = SHARES * 6000
    splits.begin_to_count(0)
    if gone:
        while left > SHARES * 5000:
            left -= read(splits, rng.randrange(SHARES), 16, seen)
        for worker in gone:
            splits.give_back(worker)
        while left > SHARES * 4000:
            left -= read(splits, rng.choice(workers), 16, seen)

    for _ in range(100):
        for _ in range(10):
            left -= read(splits, rng.choice(workers), 16, seen)
        num_read = [sum(of == share for of, _ in seen) for share in range(SHARES)]
        # Of long epochs, two; of short ones as much as two calls.
        assert max(num_read) - min(num_read) <= 2 * max(batches, 64)


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_worker_that_has_gone_between_two_ranges_does_not_count_as_a_reader(is_restored: bool) -> None:
    splits = queue(batches=4)
    for worker in range(SHARES):
        splits.assign(worker)
        splits.advance(worker, splits.batches_left(worker) or 0)
    if is_restored:
        # On another cluster, with fewer workers.
        splits.restore_at(SHARES * 64, splits.state())
    else:
        splits.give_back(2)

    for worker in (0, 1):
        splits.assign(worker)
        assert splits.batches_left(worker) == 64


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batches", "missing"), [(4, 32), (60, 40), (60, 80)])
@pytest.mark.parametrize("workers", [1, 3, 5])
def test_a_run_that_ends_early_misses_what_is_last(workers: int, batches: int, missing: int, seed: int) -> None:
    rng, splits, seen = random.Random(seed), queue(batches=batches), Counter[tuple[int, int]]()
    left = splits.last_step = SHARES * 3000
    splits.begin_to_count(0)
    while left > missing:
        left -= read(splits, rng.randrange(workers), min(left - missing, 16), seen)

    times = Counter((share, batch % batches) for share, batch in seen)
    # A call of one worker may be of the next epoch.
    assert min(times.values()) >= 3000 // batches - -(-missing // (SHARES * batches)) - 2


def test_what_is_left_of_an_epoch_is_that_of_the_present_one() -> None:
    splits = queue(batches=10)
    for worker in range(SHARES):
        splits.assign(worker)
        splits.advance(worker, 24)

    # Of six epochs.
    assert splits.batches_left(0) == 36
    assert splits.left_of_epoch == SHARES * 6


def test_ranges_of_several_epochs_are_read_one_by_one_by_synchronous_workers() -> None:
    splits, synchronous = queue(batches=10), queue(batches=10, mixes_epochs=False)
    dealt = DealtShares(lambda _, passes: passes * 10, SHARES, [0] * SHARES)
    for worker in [*range(SHARES)] * 2:
        splits.assign(worker)
        splits.advance(worker, min(7 + worker, splits.batches_left(worker) or 0))
    seen = Counter[tuple[int, int]]()
    for other in (synchronous, dealt):
        other.restore(splits.state())
        seen.clear()
        while sum(seen.values()) < 60:
            for worker in range(SHARES):
                read(other, worker, 1, seen)
        assert max(batch for _, batch in seen) <= 10 + 2 * 10 + 9


def test_a_run_whose_end_changes_reads_all_of_its_last_epoch() -> None:
    splits, seen, left = queue(batches=10), Counter[tuple[int, int]](), 3 * 10 * SHARES
    splits.last_step = 2000
    splits.begin_to_count(0)
    splits.end_at(left)
    while left:
        left -= read(splits, random.Random(left).randrange(SHARES), min(left, 16), seen)

    assert seen.keys() == {(share, batch) for share in range(SHARES) for batch in range(30)}


@pytest.mark.parametrize("workers", [1, 2])
def test_fewer_workers_than_shares_change_place_once_in_as_many_batches_as_a_call_may_read(workers: int) -> None:
    rng, splits = random.Random(1), queue(batches=4)
    left = splits.last_step = SHARES * 4000
    splits.begin_to_count(0)
    while left:
        left -= read(splits, rng.randrange(workers), min(left, 16), Counter())

    assert sum(map(splits.num_given, range(workers))) < 2 * SHARES * 4000 / 64


@pytest.mark.parametrize("workers", [3, 5])
def test_workers_change_place_nearly_as_rarely_in_short_epochs_as_in_long_ones(workers: int) -> None:
    places = Counter[int]()
    for batches in (4, 1000):
        rng, splits = random.Random(1), queue(batches=batches)
        # Of long runs: ranges become short at the end of one.
        left = splits.last_step = SHARES * 40_000
        splits.begin_to_count(0)
        while left:
            left -= read(splits, rng.randrange(workers), min(left, 16), Counter())
        places[batches] = sum(map(splits.num_given, range(workers)))

    # Three hundred times as often, if each epoch was one range.
    assert places[4] <= 4 * places[1000]


def test_a_worker_takes_half_of_what_another_one_has_left_and_not_what_its_call_reads() -> None:
    splits = ShareQueue(lambda _, passes: passes * MANY, 1, [0])

    assert splits.reserve(0, 16) == 16
    splits.assign(1)

    assert splits.range_of(splits.assign(0)) == (0, 0, 0, 308)
    assert splits.range_of(splits.assign(1)) == (0, 0, 308, MANY)
    splits.advance(0, 16)
    assert (splits.batches_left(0), splits.batches_left(1)) == (292, 292)


def test_a_worker_reads_what_it_keeps_and_begins_with_the_next_epoch_when_nothing_is_left() -> None:
    splits = queue([MANY - 1] * SHARES, batches=MANY)
    for worker in range(SHARES):
        splits.reserve(worker, 16)

    assert splits.range_of(splits.assign(0))[1:] == (0, MANY - 1, MANY)
    splits.advance(0, 1)
    assert splits.range_of(splits.assign(0)) == (1, 0, MANY, 2 * MANY)
    assert splits.keeps(0, 0)
    assert not splits.keeps(0, 1)


def test_synchronous_workers_wait_for_the_end_of_an_epoch() -> None:
    splits = queue([BATCHES - 1] * SHARES, mixes_epochs=False)
    for worker in range(SHARES):
        splits.assign(worker)
    with pytest.raises(NothingToRead):
        splits.assign(3)
    for worker in range(SHARES):
        assert not splits.look()
        splits.advance(worker, 1)

    assert splits.left_of_epoch == 0
    assert splits.look()
    assert splits.range_of(splits.assign(3))[0] == 1


@pytest.mark.parametrize("workers", range(1, 6))
def test_synchronous_workers_take_as_few_steps_as_there_can_be(workers: int) -> None:
    splits, seen, steps = queue(mixes_epochs=False), Counter[tuple[int, int]](), 0
    while sum(seen.values()) < SHARES * BATCHES:
        ready = []
        for worker in range(workers):
            try:
                splits.assign(worker)
                ready.append(worker)
            except NothingToRead:
                pass
        for worker in ready:
            read(splits, worker, 1, seen)
        steps += 1

    assert steps == -(-SHARES * BATCHES // workers)
    assert set(seen.values()) == {1}


def test_the_state_continues_where_it_was_and_a_lost_call_is_read_again() -> None:
    splits, seen = queue(batches=MANY), Counter[tuple[int, int]]()
    read(splits, 0, 16, seen)
    read(splits, 1, 4, seen)
    splits.reserve(1, 16)
    state = splits.state()
    again = queue(batches=MANY)
    again.restore(state)

    assert shares_in(state) == SHARES
    while sum(seen.values()) < SHARES * MANY:
        read(again, 7, 16, seen)
    assert set(seen.values()) == {1}
    assert seen.keys() == {(share, batch) for share in range(SHARES) for batch in range(MANY)}
    # Of a checkpoint from before there were shares.
    again.restore_at(40, None)
    assert again.range_of(again.assign(0)) == (0, 0, 40, MANY)
    assert shares_in(None) is None
    assert shares_in('{"found": [0, true], "unread": []}') is None


@pytest.mark.parametrize("seed", range(20))
def test_replicas_read_each_batch_once_in_every_epoch_however_many_there_are(seed: int) -> None:
    rng, seen, num_replicas = random.Random(seed), Counter[tuple[int, int]](), SHARES
    splits = DealtShares(lambda _, passes: passes * BATCHES, SHARES, [5] * SHARES, lambda step: step)
    left = 4 * SHARES * BATCHES - 5 * SHARES
    while left > 0:
        if rng.random() < 0.1:
            num_replicas = rng.randint(1, 5)
            splits.deal_to(num_replicas)
        if rng.random() < 0.1:
            # As a run that is resumed, or goes on with its newest checkpoint.
            splits.restore_at(0, splits.state())
        size = min(splits.reserve(replica, rng.choice([1, 4, 16])) for replica in range(num_replicas))
        if size * num_replicas > left:
            size = 1
        for replica, (share, batch) in enumerate(splits.places()):
            seen.update((share, batch + i) for i in range(size))
            splits.advance(replica, size)
        left -= size * num_replicas

    of_epochs = {batch: n for batch, n in seen.items() if batch[1] < 4 * BATCHES}
    assert set(of_epochs.values()) == {1}
    assert len(of_epochs) == 4 * SHARES * BATCHES - 5 * SHARES
    # The last step was full.
    assert len(seen) - len(of_epochs) == -left < num_replicas


def test_replicas_read_long_ranges_and_what_they_had_before() -> None:
    splits = DealtShares(lambda _, passes: passes * 100, 2, [0, 0])
    assert splits.places() == [(0, 0), (1, 0)]

    splits.deal_to(3)

    ranges = [splits.range_of(splits.assign(replica)) for replica in range(3)]
    assert ranges == [(0, 0, 0, 67), (0, 0, 67, 100), (0, 1, 34, 100)]
    splits.advance(1, 33)
    assert place_in(splits.assign(1)) == (1, 0)
