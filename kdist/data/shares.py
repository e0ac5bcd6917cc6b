"""Data whose shares workers take over from each other, from the moment when a cluster is resized.

Until then every worker reads its own share, endlessly. From then on the number of shares stays, and the number of
workers does not matter: a `ShareQueue` hands out the batches of an epoch in ranges of a share, and a worker that has
none takes half of what another one has left (work stealing, Blumofe and Leiserson, 1999). A worker keeps the examples
of the shares that it reads, so that they are sent once.
"""

from __future__ import annotations

import abc
import bisect
import json
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import tensorflow as tf

from kdist.data.base import DataContext, TrainingData
from kdist.data.columns import WorkerArgument
from kdist.data.splits import NothingToRead, Split, Splits

#: A worker takes at least so many batches from another one, if that has as many left.
_FEWEST_BATCHES = 4
#: Epochs whose shares have fewer batches are handed out several at once: to begin at another place takes a worker as
#: long as many small steps.
_LONG_RANGE = 500
#: The same with fewer workers than shares: as many batches as a call may read, by which workers are apart anyway.
_TURN = 64
#: Another worker has little left if it is this part of a share.
_LITTLE = 4
#: The examples of so many shares stay with a worker.
_SHARES_KEPT = 2
#: Seeds of batches are numbered from here: no batch that was read before has such a number.
_FIRST_SEED = 1 << 40


class ShareQueue(Splits):
    """Hands out ranges of shares, epoch after epoch.

    A range is a split called `epoch 3, share 0, batches 40 to 160`. A worker reserves what its next call reads; others
    may take the rest of its range, so that each batch is read once in every epoch, except a call that was lost. To
    change to another place takes time, so a worker goes on in its share, into the next epoch, while others have little
    left to read of the last one, and one range covers several short epochs. With fewer workers than shares, which take
    turns, it covers few; otherwise one share would be read for many epochs before the next. Towards the end of a run
    ranges become shorter (after guided self-scheduling, Polychronopoulos and Kuck, 1987), so that a run that ends early
    misses batches of the last epochs only. At its end, all of its last epoch was read.

    Args:
        end_of: the number of batches of a share in its first so many passes.
        num_shares: how many there are; their numbers are those of the workers that have read them so far.
        begins: the batches of each share that were read so far.
        batches_at: the batches of each share that are read at a global step, about, in a run of as many workers.
        mixes_epochs: whether a worker without a range begins with the next epoch while others read the rest of this
            one, and ranges may span epochs; otherwise it has nothing to read until they have.

    Attributes:
        last_step: the global step at which the run ends, if each step reads a batch; None if that is not known.
    """

    place = "the data"
    have_lengths = are_endless = True

    def __init__(
        self,
        end_of: Callable[[int, int], int],
        num_shares: int,
        begins: Sequence[int],
        batches_at: Callable[[int], int] = lambda _: 0,
        *,
        mixes_epochs: bool = True,
    ) -> None:
        # The read part of a split is counted in batches.
        super().__init__(batch_size=1)
        self._end_of, self._num_shares, self.batches_at = end_of, num_shares, batches_at
        self.mixes_epochs = mixes_epochs
        self.last_step: int | None = None
        #: The batches that are left to be reserved until then.
        self._num_left: float = math.inf
        #: The share that each worker reads, and its next batch.
        self._at: dict[int, tuple[int, int]] = {}
        #: Epochs whose ranges were found, and the first batch of each share that belongs to none.
        self._num_found, self._ends = 0, list(begins)
        #: The batches that the present call of a worker reads.
        self._reserved: Counter[int] = Counter()
        #: The shares whose examples a worker has, the last one first.
        self._kept: dict[int, list[int]] = {}

    @staticmethod
    def range_of(split: Split) -> tuple[int, int, int, int]:
        """The epoch, the share, the first batch and the end of a range."""
        return _range_named(split.name)

    def look(self) -> bool:
        with self._changed:
            # There is always another epoch.
            return self.mixes_epochs or not self._reading or bool(self._waiting)

    @property
    def left_of_epoch(self) -> int:
        """The number of unread batches of the present epoch; several that have begun count as if read one by one."""
        with self._changed:
            left, following = self._num_unread, self._num_found
            while following and left > (num_batches := self._length_of(following - 1)):
                left, following = left - num_batches, following - 1
            return left

    def assign(self, worker: int) -> Split:
        with self._changed:
            if worker not in self._reading:
                own = self._kept.setdefault(worker, [])
                split = self._reading[worker] = self._next_range(worker)
                _, share, begin, _ = self.range_of(split)
                # Its iterator is there already.
                self._given[worker] += self._at.get(worker) != (share, begin + split.num_read)
                own[:] = [share, *(other for other in own if other != share)][:_SHARES_KEPT]
            found: Split = self._reading[worker]
            return found

    def reserve(self, worker: int, most: int) -> int:
        with self._changed:
            self.assign(worker)
            number = min(most, self.batches_left(worker) or 1)
            self._num_left -= number - self._reserved[worker]
            self._reserved[worker] = number
            return number

    def batches_left(self, worker: int) -> int | None:
        with self._changed:
            split = self.split_of(worker)
            return None if split is None else _num_left(split)

    def advance(self, worker: int, num_batches: int = 1) -> None:
        with self._changed:
            if split := self._reading.get(worker):
                _, share, begin, _ = self.range_of(split)
                self._at[worker] = share, begin + split.num_read + num_batches
            self._num_left -= num_batches - self._reserved.pop(worker, 0)
            super().advance(worker, num_batches)

    def give_back(self, worker: int) -> None:
        with self._changed:
            self._num_left += self._reserved.pop(worker, 0)
            self._at.pop(worker, None)
            self._kept.pop(worker, None)
            super().give_back(worker)
            if not self._all_have_readers:
                for reader, split in self._reading.items():
                    self._reading[reader] = self._cut(split, self._reserved[reader])

    def keeps(self, worker: int, share: int) -> bool:
        """True if a worker keeps the examples of a share."""
        with self._changed:
            return share in self._kept.get(worker, ())

    def state(self) -> str:
        with self._changed:
            return self._dump([self._num_shares, self._num_found, self._ends])

    def restore(self, state: str | None) -> None:
        """As in `Splits`; without a state of these shares, they begin."""
        self.restore_at(0, state if shares_in(state) == self._num_shares else None)

    def restore_at(self, step: int, state: str | None) -> None:
        """Continues from `state`, or where a run that was never resized is at a global step, if it is None."""
        decoded = json.loads(state) if state else {"unread": []}
        begins = [self.batches_at(step)] * self._num_shares
        with self._changed:
            _, self._num_found, self._ends = decoded.get("found", [0, 0, begins])
            self._wait_with(decoded["unread"])
            for of_workers in (self._reserved, self._at, self._kept):
                of_workers.clear()
            self.begin_to_count(step)

    def begin_to_count(self, step: int) -> None:
        """Counts the batches until `last_step` from a global step on."""
        self._num_left = math.inf if self.last_step is None else self.last_step - step

    def end_at(self, last_step: int | None) -> None:
        """Changes `last_step` while workers read."""
        with self._changed:
            if last_step is not None and self.last_step is not None:
                self._num_left += last_step - self.last_step
            self.last_step = last_step

    @property
    def _num_unread(self) -> int:
        """The batches of the epochs that were begun that were not read."""
        return sum(map(_num_left, self._unread))

    @property
    def _all_have_readers(self) -> bool:
        """True if there are as many workers as shares at least, so that no share falls behind for lack of a reader."""
        return self.mixes_epochs and len(self._kept) >= self._num_shares

    @property
    def _longest(self) -> int:
        """The batches of a range that covers several epochs, at most."""
        return _LONG_RANGE if self._all_have_readers else _TURN if self.mixes_epochs else 0

    def _next_range(self, worker: int) -> Split:
        """A range that waits, half of one that another worker has, or one of the next epoch."""
        kept, at = self._kept[worker], self._at.get(worker)
        if self._may_go_on(at):
            self._find_ranges()
        all_have_readers = self._all_have_readers

        def order(split: Split) -> tuple[int, bool, bool, int]:
            epoch, share, begin, _ = self.range_of(split)
            first = 0 if all_have_readers else epoch
            return (first, (share, begin + split.num_read) != at, share not in kept, epoch)

        while True:
            if self._waiting:
                split = min(self._waiting, key=order)
                self._waiting.remove(split)
                return split if all_have_readers else self._cut(split)
            if (stolen := self._half_of_another(kept)) is not None:
                return stolen
            if self._reading and not self.mixes_epochs:
                raise NothingToRead
            self._find_ranges()

    def _may_go_on(self, at: tuple[int, int] | None) -> bool:
        """True if a worker, instead of taking a little from another one, goes on in its share with the next epoch."""
        if not self.mixes_epochs or self._waiting or at is None:
            return False
        share, batch = at
        following = self._num_batches_of(self._num_epochs_at_once())
        most = max(map(_num_left, self._reading.values()), default=0)
        is_little = most * _LITTLE <= following // self._num_shares
        # Of the last epoch everything is read, and nothing beyond it.
        return batch == self._ends[share] and is_little and following <= self._num_beyond

    @property
    def _num_beyond(self) -> float:
        """The batches that are left to be reserved beyond the epochs that were begun."""
        return self._num_left - (self._num_unread - self._reserved.total())

    def _num_epochs_at_once(self) -> int:
        """The number of epochs that the next ranges span: up to half of what is left to be read."""
        most = self._num_beyond / 2
        of_one = self._length_of(self._num_found)
        number = int(max(1, min(self._longest * self._num_shares, most) // max(1, of_one)))
        # Epochs need not be equally long.
        while number > 1 and self._num_batches_of(number) > most:
            number -= 1
        return number

    def _length_of(self, epoch: int) -> int:
        """The batches of an epoch, of all shares."""
        return sum(self._end_of(share, epoch + 1) - self._end_of(share, epoch) for share in range(self._num_shares))

    def _epoch_of(self, split: Split, ahead: int = 0) -> int:
        """The epoch of the next batch of a range, or of that so many batches ahead."""
        epoch, share, begin, _ = self.range_of(split)
        following, batch = range(epoch + 1, self._num_found + 1), begin + split.num_read + ahead
        return epoch + bisect.bisect_right(following, batch, key=lambda number: self._end_of(share, number))

    def _cut(self, split: Split, num_reserved: int = 0) -> Split:
        """Ends a range with an epoch, behind the batches that are reserved; the rest waits."""
        epoch, share, begin, end = self.range_of(split)
        following = max(self._epoch_of(split, max(0, num_reserved - 1)) + 1, self._epoch_of(split, self._longest))
        if (middle := self._end_of(share, following)) >= end:
            return split
        self._waiting.append(Split(_name(following, share, middle, end)))
        return replace(split, name=_name(epoch, share, begin, middle))

    def _num_batches_of(self, num_epochs: int) -> int:
        """The batches of all shares until so many more epochs end."""
        ends = enumerate(self._ends)
        return sum(max(0, self._end_of(share, self._num_found + num_epochs) - begin) for share, begin in ends)

    def _half_of_another(self, kept: Sequence[int]) -> Split | None:
        free = {worker: _num_left(split) - self._reserved[worker] for worker, split in self._reading.items()}
        # Of an earlier epoch first; then what need not be sent; then the longest one.
        order = sorted(
            (worker for worker in free if free[worker] > (0 if self.mixes_epochs or self._reserved[worker] else 1)),
            key=lambda worker: (
                self.range_of(self._reading[worker])[0],
                self.range_of(self._reading[worker])[1] not in kept,
                -free[worker],
            ),
        )
        if not order:
            return None
        victim = order[0]
        split = self._reading[victim]
        epoch, share, begin, end = self.range_of(split)
        fewest = _FEWEST_BATCHES if self.mixes_epochs else 1
        middle = end - max(free[victim] // 2, min(free[victim], fewest))
        if begin + split.num_read == middle:
            del self._reading[victim]
        else:
            self._reading[victim] = replace(split, name=_name(epoch, share, begin, middle))
        return Split(_name(epoch, share, middle, end))

    def _find_ranges(self) -> None:
        """Lets the ranges of the next epoch wait, or of several short ones."""
        epoch, self._num_found = self._num_found, self._num_found + self._num_epochs_at_once()
        for share, begin in enumerate(self._ends):
            end = self._end_of(share, self._num_found)
            if begin < end:
                self._waiting.append(Split(_name(epoch, share, begin, end)))
                self._ends[share] = end


class DealtShares(ShareQueue):
    """Deals each epoch to replicas, which read a batch each in every step, in parts of equal length.

    No replica has read more batches than another one, so at the end of an epoch some may read one of the next epoch
    while others read the last ones of this epoch. Args: as of `ShareQueue`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_replicas = self._num_shares
        #: The ranges that each replica is to read, and the number of batches that it was dealt so far.
        self._dealt: dict[int, deque[Split]] = defaultdict(deque)
        self._num_dealt: Counter[int] = Counter()

    def deal_to(self, num_replicas: int) -> None:
        """Deals what was not read to another number of replicas."""
        with self._changed:
            self._num_replicas = num_replicas
            self._wait_with([(split.name, split.num_read) for split in self._unread])

    def places(self) -> list[tuple[int, int]]:
        """The share that each replica reads next, and the batch of it."""
        return [place_in(self.assign(replica)) for replica in range(self._num_replicas)]

    @property
    def _longest(self) -> int:
        # Each epoch is dealt by itself.
        return 0

    @property
    def _unread(self) -> list[Split]:
        return [*super()._unread, *(split for splits in self._dealt.values() for split in splits)]

    def _wait_with(self, unread: Iterable[tuple[str, int]]) -> None:
        super()._wait_with(unread)
        self._dealt.clear()
        self._num_dealt.clear()

    def _next_range(self, worker: int) -> Split:
        while not (own := self._dealt[worker]):
            self._deal()
        return own.popleft()

    def _deal(self) -> None:
        """Deals an epoch: the rest of the first one that was begun, or the next one."""
        if not self._waiting:
            self._find_ranges()
        waiting, self._waiting = self._waiting, deque()
        epochs = list(map(self._epoch_of, waiting))
        now = [self._cut(split) for split, epoch in zip(waiting, epochs) if epoch == min(epochs)]
        self._waiting.extend(split for split, epoch in zip(waiting, epochs) if epoch != min(epochs))
        this_epoch = sorted(map(self.range_of, map(_rest, now)))
        total = self._num_dealt.total() + sum(end - begin for _, _, begin, end in this_epoch)
        left = deque(this_epoch)
        for replica in range(self._num_replicas):
            # As if batches were dealt one by one, since the replicas have had equally many.
            wanted = -(-(total - replica) // self._num_replicas) - self._num_dealt[replica]
            self._num_dealt[replica] += wanted
            while wanted:
                epoch, share, begin, end = left.popleft()
                middle = min(end, begin + wanted)
                self._dealt[replica].append(Split(_name(epoch, share, begin, middle)))
                wanted -= middle - begin
                if middle < end:
                    left.appendleft((epoch, share, middle, end))


def place_in(split: Split) -> tuple[int, int]:
    """The share of a range, and the next batch of it that is to be read."""
    _, share, begin, _ = ShareQueue.range_of(split)
    return share, begin + split.num_read


def shares_in(state: str | None) -> int | None:
    """The number of shares of the data whose state it is, if that is one of a `ShareQueue`."""
    found = json.loads(state).get("found") if state else None
    return int(found[0]) if isinstance(found, list) and len(found) == 3 and isinstance(found[2], list) else None


# A worker that looks for a range reads the names of all that wait.
@lru_cache(maxsize=4096)
def _range_named(name: str) -> tuple[int, int, int, int]:
    epoch, share, begin, end = map(int, re.findall(r"\d+", name))
    return epoch, share, begin, end


def _name(epoch: int, share: int, begin: int, end: int) -> str:
    return f"epoch {epoch}, share {share}, batches {begin} to {end}"


def _num_left(split: Split) -> int:
    _, _, begin, end = ShareQueue.range_of(split)
    return end - begin - split.num_read


def _rest(split: Split) -> Split:
    """The part of a range that was not read."""
    epoch, share, begin, end = ShareQueue.range_of(split)
    return Split(_name(epoch, share, begin + split.num_read, end))


class Shares(TrainingData):
    """Other data, in a number of shares that does not depend on the number of workers."""

    def __init__(self, data: TrainingData, num_shares: int) -> None:
        self._data, self.num_shares = data, num_shares
        self.calls_user_code = data.calls_user_code  # type: ignore[misc]
        #: What each worker was sent of shares, by share and argument. The worker's own thread changes it.
        self._sent: dict[int, dict[tuple[int, int], list[tf.Tensor | tf.Variable]]] = {}

    def batches_per_pass(self, num_workers: int) -> int | None:
        return self._data.batches_per_pass(self.num_shares)

    def share_end(self, share: int, num_shares: int, num_passes: int) -> int | None:
        return self._data.share_end(share, self.num_shares, num_passes)

    def fingerprint(self) -> str | None:
        return self._data.fingerprint()

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return self._data.specs(self.num_shares)

    def trace_transfer(self, num_workers: int) -> None:
        self._data.trace_transfer(self.num_shares)

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        return self._data.batches(replace(context, num_workers=self.num_shares), *arguments)

    @abc.abstractmethod
    def place(self, worker: int) -> tuple[int, int]:
        """The share that a worker reads, and the next batch of it."""

    @abc.abstractmethod
    def _keeps(self, worker: int, share: int) -> bool:
        """True if a worker keeps the examples of a share."""

    def place_of(self, worker: int, first_step: int, first_batch: int) -> tuple[int, int, int]:
        share, batch = self.place(worker)
        return share, _FIRST_SEED + batch, batch

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        share, _ = self.place(worker_index)
        sent = self._sent.setdefault(worker_index, {})
        for key in [key for key in sent if not self._keeps(worker_index, key[0])]:
            del sent[key]

        def once(
            key: tuple[int, int], send: Callable[[], list[tf.Tensor | tf.Variable]]
        ) -> list[tf.Tensor | tf.Variable]:
            if key not in sent:
                sent[key] = send()
            return sent[key]

        arguments = enumerate(self._data.arguments(share, self.num_shares))
        return [partial(once, (share, n), argument) if callable(argument) else argument for n, argument in arguments]

    def forget(self, worker: int | None = None) -> None:
        if worker is None:
            self._sent.clear()
        else:
            self._sent.pop(worker, None)


class SharedData(Shares):
    """Other data, in as many shares as there were workers when training began.

    Args:
        data: of which `share_end` is known.
        num_shares, begins, batches_at, mixes_epochs: see `ShareQueue`.
        in_step: whether the workers are replicas that read a batch each in every step, see `DealtShares`.
    """

    splits: ShareQueue

    def __init__(
        self,
        data: TrainingData,
        num_shares: int,
        begins: Sequence[int],
        batches_at: Callable[[int], int] = lambda _: 0,
        *,
        mixes_epochs: bool = True,
        in_step: bool = False,
    ) -> None:
        def end_of(share: int, num_passes: int) -> int:
            end = data.share_end(share, num_shares, num_passes)
            assert end is not None
            return end

        super().__init__(data, num_shares)
        if in_step:
            self.splits = DealtShares(end_of, num_shares, begins, batches_at)
        else:
            self.splits = ShareQueue(end_of, num_shares, begins, batches_at, mixes_epochs=mixes_epochs)

    def elsewhere(self) -> SharesElsewhere:
        """The same, for another process, which is told where its replicas read."""
        return SharesElsewhere(self._data, self.num_shares)

    def place(self, worker: int) -> tuple[int, int]:
        return place_in(self.splits.assign(worker))

    def _keeps(self, worker: int, share: int) -> bool:
        return self.splits.keeps(worker, share)


class SharesElsewhere(Shares):
    """Shares whose queue another process has, which tells the place of each replica.

    Attributes:
        arrived: these places, by replica.
        state_there: what was read of the data, when the other process saves.
    """

    def __init__(self, data: TrainingData, num_shares: int) -> None:
        super().__init__(data, num_shares)
        self.arrived: Sequence[tuple[int, int]] = ()
        self.state_there: str | None = None

    def state(self) -> str | None:
        return self.state_there

    def place(self, worker: int) -> tuple[int, int]:
        return self.arrived[worker]

    def _keeps(self, worker: int, share: int) -> bool:
        return share == self.arrived[worker][0]
