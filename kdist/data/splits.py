"""Data in splits: parts that are each read by one worker, from one end to the other.

The words are those of Flink's sources (FLIP-27). On the chief, a `SplitEnumerator` finds splits, and the `SplitQueue`
hands them to workers and knows how much of each was read. Its state is part of every checkpoint, together with the
parameters that were trained on exactly that much.
"""

from __future__ import annotations

import abc
import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kdist.errors import DataSourceError
from kdist.log import warn

#: A dataset prefetches two, and what a user's `parse` does may prefetch more.
_BATCHES_READ_AHEAD = 10


class NothingToRead(Exception):
    """All splits that were found are read, or being read."""


class UnreadableSplit(Exception):
    """A split cannot be read, or not to its end."""


@dataclass(frozen=True)
class Split:
    """A part of the data, of which `num_read` records were read. Its name is a file, or a range of messages."""

    name: str
    num_read: int = 0

    @property
    def place(self) -> str:
        """The place up to which it was read, for people."""
        return f"{self.name}, after {self.num_read} records"


class Splits(abc.ABC):
    """Hands out parts of the data to workers. Thread-safe.

    Args:
        batch_size: records that a worker reads at once; 0 if a worker reads all of a split at once.

    Attributes:
        place: the source of the splits, for people to read.
        arrive: they keep arriving, so that a run waits for them.
        have_lengths: `batches_left` knows how much of a split is left, so that a call can have several steps.
        pass_through_chief: this process reads them, and sends them to the workers.
        are_endless: there is always another one.
    """

    place: str
    arrive: ClassVar[bool] = False
    have_lengths: ClassVar[bool] = False
    pass_through_chief: ClassVar[bool] = False
    are_endless: ClassVar[bool] = False

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._changed = threading.Condition()
        #: Splits without a worker, and by worker.
        self._waiting: deque[Any] = deque()
        self._reading: dict[int, Any] = {}
        self._batches: Counter[int] = Counter()
        #: How many splits each worker was given.
        self._given: Counter[int] = Counter()
        #: For splits that lost readers: the place of the last one, and how many in a row were lost there.
        self._lost: dict[str, tuple[int, int]] = {}

    def begin(self, interrupted: Callable[[], bool]) -> None:  # noqa: B027 - not all of them let a worker wait
        """Begins a session; when `interrupted` returns True, no worker is to wait for a split any more."""

    def close(self) -> None:  # noqa: B027 - not all of them hold anything
        """Ends the session."""

    @abc.abstractmethod
    def look(self) -> bool:
        """True if a split waits for a worker; called in the thread that runs the training loop."""

    def assign(self, worker: int) -> Split:
        """The split of a worker: the one that it has, or the next one; raises `NothingToRead` if there is none."""
        with self._changed:
            if worker not in self._reading:
                if not self._waiting:
                    raise NothingToRead
                self._reading[worker] = self._waiting.popleft()
                self._given[worker] += 1
                self._changed.notify_all()
            split: Split = self._reading[worker]
            return split

    def split_of(self, worker: int) -> Split | None:
        """The split that a worker is reading."""
        return self._reading.get(worker)

    def num_given(self, worker: int) -> int:
        """The number of splits that a worker was given; another one is another split."""
        return self._given[worker]

    def num_batches(self, worker: int) -> int:
        """The number of batches that a worker has read, of all its splits."""
        return self._batches[worker]

    def batches_left(self, worker: int) -> int | None:
        """The batches that a worker has not read of its split; None if nobody knows, or it has none."""
        return None

    def reserve(self, worker: int, most: int) -> int:
        """The number of batches, at most `most`, that the next call of a worker reads; they are of one split.

        Raises `NothingToRead` if there is no split for it.
        """
        if most == 1:
            return 1
        self.assign(worker)
        return min(most, self.batches_left(worker) or 1)

    def advance(self, worker: int, num_batches: int = 1) -> None:
        """Counts batches that a worker has read."""
        with self._changed:
            # A worker that counts as lost has no split any more.
            if split := self._reading.get(worker):
                self._reading[worker] = replace(split, num_read=split.num_read + num_batches * self._batch_size)
                self._batches[worker] += num_batches
            if not self._batch_size or self.batches_left(worker) == 0:
                self._reading.pop(worker, None)

    def finish(self, worker: int) -> None:
        """Ends the split that a worker has read."""
        with self._changed:
            self._reading.pop(worker, None)

    def skip(self, worker: int, reason: str) -> bool:
        """Passes over the rest of a split that its worker cannot read; False if that is an error."""
        return False

    def give_back(self, worker: int) -> None:
        """Lets another worker continue with the split of one that was lost, or does not continue."""
        with self._changed:
            if split := self._reading.pop(worker, None):
                self._waiting.appendleft(split)
                self._changed.notify_all()

    def count_loss(self, split: Split) -> int:
        """Counts the loss of a worker that read a split; returns how many in a row were lost at that place of it."""
        place, in_a_row = self._lost.get(split.name, (split.num_read, 0))
        # Readers are ahead of the batches that are trained.
        is_there = split.num_read - place <= _BATCHES_READ_AHEAD * self._batch_size
        in_a_row = in_a_row + 1 if is_there else 1
        self._lost[split.name] = split.num_read, in_a_row
        return in_a_row

    def wait(self) -> str | None:
        """Waits a little when no worker can read anything; returns the reason why training ends, if it does."""
        # For the other workers, which read the last splits.
        time.sleep(0)
        return None

    @abc.abstractmethod
    def state(self) -> str:
        """The part of the data that was read, as JSON."""

    @abc.abstractmethod
    def restore(self, state: str | None) -> None:
        """Continues from `state`, or begins anew if it is None; no worker has a split."""

    @property
    def _unread(self) -> list[Any]:
        """The splits that are not read to their end, as far as they were found."""
        return [*self._reading.values(), *self._waiting]

    def _dump(self, found: Any) -> str:
        """The state as JSON: which splits were found, and those that are unread."""
        return json.dumps({"found": found, "unread": [[split.name, split.num_read] for split in self._unread]})

    def _wait_with(self, unread: Iterable[tuple[str, int]]) -> None:
        """Lets the unread splits of a state wait for workers, in the place of the present ones."""
        self._waiting = deque(Split(*each) for each in unread)
        self._reading.clear()


class Passes(abc.ABC):
    """Data that is read in passes of unknown length: a pass ends when all of it was read.

    Attributes:
        steps_per_epoch: of an epoch that does not end with its pass, which one worker reads; None if a pass is an
            epoch.
        first_epoch: the number, from 0, of the epoch with which the present pass has begun.
    """

    steps_per_epoch: int | None
    first_epoch: int

    @property
    @abc.abstractmethod
    def num_read(self) -> int:
        """Batches of the present pass that were read."""

    @property
    @abc.abstractmethod
    def is_only_pass(self) -> bool:
        """True if no other pass follows."""

    @abc.abstractmethod
    def pass_has_ended(self) -> bool:
        """True if the present pass was read to its end."""

    @abc.abstractmethod
    def begin_pass(self) -> None:
        """Begins the next pass."""

    def epoch_at(self, num_read: int) -> int:
        """The number of the epoch that has begun when so many batches of the present pass were read."""
        return self.first_epoch + (num_read // self.steps_per_epoch if self.steps_per_epoch else 0)

    def epoch_after(self, num_read: int) -> int:
        """The number of the epoch with which the next pass begins if this one has so many batches."""
        if not self.steps_per_epoch:
            return self.first_epoch + 1
        return self.first_epoch + max(1, math.ceil(num_read / self.steps_per_epoch))


class SplitEnumerator(abc.ABC):
    """Finds the splits of one source. Except for `check`, it is used by one thread only.

    Attributes:
        place: the source, for people to read.
        poll_secs: seconds between two looks.
        idle_secs: seconds without a new split after which training ends.
    """

    place: str
    poll_secs: float
    idle_secs: float

    @abc.abstractmethod
    def discover(self) -> list[str]:
        """The names of new splits, in the order to read them; raises `OSError` if the source cannot be reached now."""

    @property
    @abc.abstractmethod
    def ended_by(self) -> str | None:
        """The reason why `discover` will find nothing more; None if it may."""

    def check(self, name: str) -> None:  # noqa: B027 - not every source can check
        """Looks at a split before a worker gets it.

        Raises:
            UnreadableSplit: it is skipped.
            ConfigError: training cannot continue with it.
        """

    @abc.abstractmethod
    def state(self) -> Any:
        """The splits that were found, for JSON."""

    @abc.abstractmethod
    def restore(self, state: Any) -> None:
        """Continues from `state`."""


class SplitQueue(Splits):
    """Hands each split to one worker. Tests replace `clock` and `pause`."""

    arrive = True

    def __init__(
        self,
        enumerator: SplitEnumerator,
        batch_size: int,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(batch_size)
        self.place = enumerator.place
        self.idle_secs = enumerator.idle_secs
        self._enumerator = enumerator
        self._clock = clock
        self._pause = pause
        self._last_look: float | None = None
        self._idle_since: float | None = None
        self._trouble: OSError | None = None

    def look(self) -> bool:
        """Looks for new splits, if none waits for a worker and the last look is some time ago."""
        now = self._clock()
        is_due = self._last_look is None or now - self._last_look >= self._enumerator.poll_secs
        if is_due and not self._waiting:
            self._last_look = now
            try:
                found = self._enumerator.discover()
            except OSError as error:
                if self._trouble is None:
                    warn(f"{self.place} cannot be read at present: {error}; trying again")
                self._trouble = error
            else:
                self._trouble = None
                with self._changed:
                    self._waiting.extend(map(Split, found))
        return bool(self._waiting)

    def assign(self, worker: int) -> Split:
        """As in `Splits`; raises `ConfigError` if the next split does not fit the others."""
        while True:
            with self._changed:
                is_new = worker not in self._reading
                split = super().assign(worker)
                if not is_new:
                    return split
                self._idle_since = None
            try:
                self._enumerator.check(split.name)
                return split
            except UnreadableSplit as error:
                self.skip(worker, str(error))

    def skip(self, worker: int, reason: str) -> bool:
        with self._changed:
            split = self._reading.pop(worker, None)
        if split is not None:
            what = f"what follows {split.num_read} records " if split.num_read else ""
            warn(f"{split.name}: {what}cannot be read and is skipped: {reason}")
        return True

    def wait(self) -> str | None:
        """As in `Splits`; training ends if nothing more will come, or nothing came for `idle_secs`.

        Raises `DataSourceError` if the source could not be reached for so long.
        """
        if self.look():
            return None
        # Or until a worker whose host does not respond returns, or counts as lost: it has one.
        is_being_read = bool(self._reading)
        if not is_being_read and (ended_by := self._enumerator.ended_by) is not None:
            return ended_by
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since >= self.idle_secs and not is_being_read:
            if self._trouble is not None:
                raise DataSourceError(
                    f"{self.place} could not be read for {self.idle_secs:g} s (idle_secs): {self._trouble}"
                ) from self._trouble
            return f"{self.place}, where nothing arrived for {self.idle_secs:g} s"
        # Not longer: a signal is to end it soon.
        self._pause(min(1.0, self._enumerator.poll_secs))
        return None

    def state(self) -> str:
        with self._changed:
            return self._dump(self._enumerator.state())

    def restore(self, state: str | None) -> None:
        if state is None:
            return
        decoded = json.loads(state)
        with self._changed:
            self._enumerator.restore(decoded["found"])
            self._wait_with(decoded["unread"])
            self._last_look = self._idle_since = None
