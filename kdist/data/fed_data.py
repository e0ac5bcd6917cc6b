"""`FedData`: batches that a thread of this process makes and `FeedQueue` hands to the workers, one by one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import tensorflow as tf

from kdist._compat.tensorflow import QuietExecutor, executor_scope
from kdist.data.base import DataContext, Readers, TrainingData
from kdist.data.batch_source import BatchSource
from kdist.data.columns import WorkerArgument
from kdist.data.splits import NothingToRead, Passes, Split, Splits
from kdist.errors import TaskError
from kdist.forks import children_end_here

_LOOK_SECS = 0.2
#: A thread that is in the user's code by then ends when that returns.
_STOP_SECS = 2.0
_BUFFERED_PER_READER = 2


@dataclass(frozen=True)
class Batch(Split):
    """A split of one batch: the tensors of its parts, and its number in its pass."""

    tensors: tuple[tf.Tensor, ...] = ()
    number: int = 0
    pass_number: int = 0

    @property
    def place(self) -> str:
        return self.name


class FeedQueue(Splits, Passes):
    """Hands each batch to one reader; a bounded number of them is made ahead, in a thread.

    A pass begins when it is needed; if the readers read by passes, `begin_pass` begins it.
    """

    pass_through_chief = True

    def __init__(self, source: BatchSource, readers: Readers, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(batch_size=0)
        self.place = source.name
        self._interrupted: Callable[[], bool] = lambda: False
        self._source = source
        self._readers = readers
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        #: The present pass: its number, the number of its next batch, and True when all of them were made.
        self._pass, self._next, self._is_made = 0, 0, False
        self._error: BaseException | None = None
        self._made_at = 0.0
        self.steps_per_epoch = readers.steps_per_epoch
        self.first_epoch = 0

    @property
    def num_read(self) -> int:
        with self._changed:
            return min([*(batch.number for batch in self._unread), self._next])

    @property
    def is_only_pass(self) -> bool:
        return not self._source.repeats

    def begin(self, interrupted: Callable[[], bool]) -> None:
        self._interrupted = interrupted

    def look(self) -> bool:
        with self._changed:
            if self._readers.at_once > 1:
                # No step can begin with fewer.
                return self._wait_for(self._readers.at_once)
            self._start()
            return bool(self._waiting) or not self._is_over

    def assign(self, worker: int) -> Batch:
        """As in `Splits`, but waits for the batch.

        Raises:
            TaskError: the user's code failed, or took too long.
            ConfigError: the batch is not like the first ones.
        """
        with self._changed:
            if worker not in self._reading and not self._wait_for(1):
                raise NothingToRead
            return cast(Batch, super().assign(worker))

    def wait(self) -> str | None:
        # By passes, it is the end of an epoch.
        with self._changed:
            if self._error is not None:
                raise self._error
            is_last = self.pass_has_ended() and not self._readers.by_passes
            return f"{self.place}, which ran out of data" if is_last else None

    def pass_has_ended(self) -> bool:
        # The rest of it may be too little for a step.
        with self._changed:
            return self._is_over and len(self._waiting) < self._readers.at_once and not self._reading

    def begin_pass(self) -> None:
        with self._changed:
            self.first_epoch = self.epoch_after(self._next)
            self._pass, self._next, self._is_made = self._pass + 1, 0, False
            self._changed.notify_all()

    def state(self) -> str:
        with self._changed:
            present = (self._pass + 1, 0) if self._is_made else (self._pass, self._next)
            pass_number, batch = min([*((batch.pass_number, batch.number) for batch in self._unread), present])
            position = {"pass": pass_number, "batch": batch}
            if self.steps_per_epoch:
                position["epoch"] = self.first_epoch if pass_number == self._pass else self.epoch_after(self._next)
            return json.dumps(position)

    def restore(self, state: str | None) -> None:
        if not self._source.repeats:
            # Batches that were read cannot be read again.
            for worker in sorted(self._reading, key=lambda worker: self._reading[worker].number, reverse=True):
                self.give_back(worker)
            return
        self.close()
        with self._changed:
            self._waiting.clear()
            self._reading.clear()
            position = json.loads(state) if state else {}
            self._pass, self._next = position.get("pass", 0), position.get("batch", 0)
            self.first_epoch = position.get("epoch", self._pass)
            self._is_made, self._error = False, None

    def close(self) -> None:
        """Ends the thread; the next look begins another one."""
        if self._thread is not None:
            with self._changed:
                self._stop.set()
                self._changed.notify_all()
            self._thread.join(_STOP_SECS)
            self._thread = None

    @property
    def _is_over(self) -> bool:
        """True if no other batch is made before a pass is begun, if one is."""
        return self._is_made and (self._readers.by_passes or not self._source.repeats)

    def _wait_for(self, number: int) -> bool:
        """Waits until so many batches are there; False if there will be none. Raises as `assign`."""
        self._start()
        began = self._clock()
        while len(self._waiting) < number:
            if self._error is not None:
                raise self._error
            if self._is_over or self._interrupted():
                return False
            if self._is_made:
                self.begin_pass()
            self._changed.wait(_LOOK_SECS)
            if self._clock() - max(began, self._made_at) > self._readers.timeout:
                late = TimeoutError(f"made no batch for {self._readers.timeout:g} s (cluster.step_timeout)")
                raise TaskError("chief", late, where=self.place)
        return True

    def _start(self) -> None:
        if self._thread is None:
            self._stop = threading.Event()
            # The thread of an earlier position, which may be in the user's code, has an event of its own.
            self._thread = threading.Thread(target=self._make, args=[self._stop], daemon=True, name="kdist-feed")
            self._thread.start()

    def _make(self, stop: threading.Event) -> None:
        source = self._source
        try:
            with executor_scope(QuietExecutor()), tf.device("CPU:0"), children_end_here():
                source.reset()
                while not stop.is_set():
                    self._make_pass(stop)
        except BaseException as error:  # noqa: BLE001 - raised where batches are read
            with self._changed:
                if not stop.is_set():
                    self._error = error
                    self._changed.notify_all()
        finally:
            source.stop()

    def _make_pass(self, stop: threading.Event) -> None:
        """Makes the batches of the present pass from its next one on, and waits until another one is begun."""
        pass_number = self._pass
        most = max(_BUFFERED_PER_READER * self._readers.number, self._readers.at_once)
        number = -1
        for number, tensors in self._source.one_pass(pass_number, self._next):
            with self._changed:
                self._made_at = self._clock()
                if tensors is not None:
                    self._waiting.append(
                        Batch(f"batch {number} of {self.place}", 0, tuple(tensors), number, pass_number)
                    )
                    self._next = number + 1
                    self._changed.notify_all()
                self._changed.wait_for(lambda: len(self._waiting) < most or stop.is_set())
                if stop.is_set():
                    return
        if number < 0 and not self._next:
            raise TaskError("chief", ValueError("has not a single batch"), where=self.place)
        with self._changed:
            self._is_made = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_made or stop.is_set())


class FedData(TrainingData):
    """The batches of a `BatchSource`; a worker is sent one at a time."""

    splits: FeedQueue

    def __init__(self, source: BatchSource, readers: Readers) -> None:
        self.source = source
        self._spec = source.element_spec
        readers = replace(readers, by_passes=readers.by_passes and source.num_batches is None)
        self.splits = FeedQueue(source, readers)
        self.passes = self.splits if readers.by_passes else None

    def batches_per_pass(self, num_workers: int) -> int | None:
        return self.source.num_batches

    def __getstate__(self) -> dict[str, Any]:
        # They belong to this process.
        return {key: value for key, value in vars(self).items() if key not in ("splits", "passes", "source")}

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return tf.nest.flatten(self._spec, expand_composites=True)

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        return list(self.splits.assign(worker_index).tensors)

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        # A dataset of one batch would take ten times as long to make.
        return tf.nest.pack_sequence_as(self._spec, arguments, expand_composites=True)
