"""`Values`: what training changes, by its names in a checkpoint; `StoreValues` has it in stores."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from kdist.errors import ConfigError
from kdist.model.names import GLOBAL_STEP
from kdist.parameters.store import ParameterStore
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.values.histograms import Histograms

T = TypeVar("T")


class Values(abc.ABC):
    """The values that training changes, by name: the content of a checkpoint.

    Every method waits until no step is in flight, but for `shapes` and `by_rows`, which never change.
    """

    @property
    @abc.abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every value; None as the number of rows of a dynamic table."""

    @property
    @abc.abstractmethod
    def by_rows(self) -> frozenset[str]:
        """The names of the values of which a delta has the changed rows only."""

    @abc.abstractmethod
    def global_step(self) -> int:
        """The exact number of updates applied."""

    def read(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """The present values; only `names` if they are given."""
        return {name: value for portion in self.portions(names) for name, value in portion.items()}

    @abc.abstractmethod
    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        """The same in portions, so that they are not in memory at once."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values."""

    @abc.abstractmethod
    def histograms(self) -> dict[str, np.ndarray]:
        """The distribution of each parameter, see `Histograms.read`."""

    @abc.abstractmethod
    def next_interval(self, since: int | None) -> int | None:
        """Begins the next interval between saves.

        Args:
            since: the interval after which the next delta has what changed; None if there is no such delta.

        Returns:
            The number of the interval that it ends, for `DeltaBase`; None if every checkpoint is to be a full one.
        """

    @abc.abstractmethod
    def save(self, prefix: Path, since: DeltaBase | None = None) -> None:
        """Writes all values, and the seed, as a TensorFlow checkpoint.

        Args:
            prefix: of its files.
            since: of tables, only the rows that have changed since then are written: a delta.

        Raises:
            NonFiniteError: a value is NaN or infinite; nothing is written.
            tf.errors.OpError, OSError: it cannot be written.
        """

    @abc.abstractmethod
    def begin_save(self, prefix: Path, since: DeltaBase | None = None) -> Future[None]:
        """As `save`, of the present values, which may change as soon as it returns.

        Returns:
            An argument for `wait_for`, once, before the next `begin_save`; it raises the errors.
        """

    def wait_for(self, written: Future[None]) -> None:
        """Waits for what `begin_save` has begun."""
        written.result()

    @abc.abstractmethod
    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        """Reads all values from a checkpoint, except for the learning rate.

        Args:
            deltas: read on top of it, in this order.

        Raises:
            tf.errors.OpError: the checkpoint, or a delta, is damaged; some values may have been read.
        """

    @abc.abstractmethod
    def count_rows(self) -> None:
        """Tells the dynamic layers of the model how many rows they have, if it has any."""

    @abc.abstractmethod
    def use_averages(self) -> None:
        """Sets parameters to their moving averages, if the optimizer keeps any, as Keras does at the end of `fit`."""

    def check(self, values: Mapping[str, np.ndarray]) -> None:
        """Refuses values that `write` could not set.

        Raises:
            ConfigError: there is no such value, or it has another shape.
        """
        for name, array in values.items():
            if name not in self.shapes:
                known = ", ".join(sorted(self.shapes))
                raise ConfigError(f"{name}: there is no such value to write; there are learning_rate, {known}")
            if None in self.shapes[name]:
                raise ConfigError(
                    f"{name}: belongs to a DynamicEmbedding, whose rows come from ids alone; it is read only"
                )
            if array.shape != tuple(self.shapes[name]):
                raise ConfigError(f"{name}: has shape {array.shape}; the model's has {tuple(self.shapes[name])}")


class Guard(Protocol):
    """Lets functions use stored values while no step changes them."""

    def at_rest(
        self, function: Callable[[], T], kind: Hashable = None, *, traces: bool = False, of_files: bool = False
    ) -> T:
        """Calls a function when nothing is in flight.

        Args:
            kind: identifies the TensorFlow functions that it calls.
            traces: whether it may trace new ones.
            of_files: whether it may fail because of a file, not of a task.
        """

    def start_aside(self, function: Callable[[], T], kind: Hashable) -> Future[T]:
        """Calls a function in a thread, while training continues."""

    def wait_for(self, outcome: Future[T]) -> T:
        """Waits for what `start_aside` has started."""


class StoreValues(Values):
    """The values of a `ParameterStore`, or of several that are alike.

    Args:
        stores: the first one is read; all are written.
        guard: of the strategy that changes them.
        beside: returns the content of a checkpoint beside the values, by name.
        has_set: called when values were set, with the global step if that was among them.
    """

    def __init__(
        self,
        stores: Sequence[ParameterStore],
        guard: Guard,
        beside: Callable[[], Mapping[str, np.ndarray]],
        has_set: Callable[[int | None], None],
    ) -> None:
        self._store = stores[0]
        self._stores = stores
        self._guard = guard
        self._beside = beside
        self._has_set = has_set
        self._histograms: Histograms | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._store.values.shapes, **self._store.dynamic.shapes}

    @property
    def by_rows(self) -> frozenset[str]:
        return self._store.files.by_rows

    def global_step(self) -> int:
        return self._guard.at_rest(self._store.counters.global_step, "global_step")

    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        for portions in (self._store.values.portions(names), self._store.dynamic.read(names)):
            read = iter(portions)
            # Keras often uses what is read, and traces functions of its own.
            while (portion := self._guard.at_rest(partial(next, read, None), "read", traces=True)) is not None:
                yield portion

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        def write() -> None:
            for store in self._stores:
                store.write(values)

        self._guard.at_rest(write, ("write", *sorted(values)))
        self._has_set(int(values[GLOBAL_STEP]) if GLOBAL_STEP in values else None)

    def histograms(self) -> dict[str, np.ndarray]:
        def read() -> dict[str, np.ndarray]:
            self._histograms = self._histograms or Histograms(self._store.values)
            return self._histograms.read()

        return self._guard.at_rest(read, "histograms", traces=True)

    def next_interval(self, since: int | None) -> int | None:
        return self._guard.at_rest(lambda: self._store.files.next_interval(since), "next_interval")

    def save(self, prefix: Path, since: DeltaBase | None = None) -> None:
        self._on_files(lambda: self._store.files.save(prefix, self._beside(), since), ("save", since is None))

    def begin_save(self, prefix: Path, since: DeltaBase | None = None) -> Future[None]:
        def copy() -> Callable[[], None]:
            return self._store.files.begin_save(prefix, self._beside(), since)

        write = self._on_files(copy, ("begin_save", since is None))
        return self._guard.start_aside(write, "finish_save")

    def wait_for(self, written: Future[None]) -> None:
        self._guard.wait_for(written)

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        def restore() -> int:
            for store in self._stores:
                store.restore(path, deltas)
            return self._store.counters.global_step()

        self._has_set(self._on_files(restore, ("restore", bool(deltas))))

    def count_rows(self) -> None:
        if self._store.dynamic:
            self._guard.at_rest(self._store.dynamic.count, "count_rows")

    def use_averages(self) -> None:
        self._guard.at_rest(self._store.use_averages, "use_averages")

    def _on_files(self, function: Callable[[], T], kind: Hashable) -> T:
        return self._guard.at_rest(function, kind, traces=True, of_files=True)
