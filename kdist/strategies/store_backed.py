"""What strategies with a `ParameterStore` share: running steps, reading and writing the store."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import tensorflow as tf

from kdist.data.splits import Splits
from kdist.model.names import DATA_STATE, EPOCHS_BEGIN, GLOBAL_STEP, SEED
from kdist.parameters.placement.plan import PlacementPlan, wrong_id
from kdist.parameters.store import ParameterStore
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.values.histograms import Histograms
from kdist.strategies.base import Strategy
from kdist.strategies.prepared_training import PreparedTraining
from kdist.strategies.sweeper import Sweeper
from kdist.strategies.traced_calls import CallSizer, StepLogs
from kdist.threads import in_thread


class StoreBackedStrategy(Strategy):
    """A strategy that keeps its values in a `ParameterStore`. Subclasses set these three in `start`."""

    _prepared: PreparedTraining
    _store: ParameterStore
    _sizer: CallSizer
    _warming_up = True
    #: Logs of finished steps that `run` has not returned yet.
    _ahead: StepLogs | None = None
    #: When the last run ended, if it left steps in flight.
    _last_end: float | None = None
    _histograms: Histograms | None = None
    _sweeper: Sweeper | None = None

    def _begin_to_sweep(self) -> None:
        """From now on rows of dynamic tables are evicted, if any are to be."""
        if (sweep := self._store.sweep) is not None:
            self._sweeper = Sweeper(sweep, in_thread, lambda outcome: outcome.result())

    def _wait_for_sweep(self) -> None:
        if self._sweeper is not None:
            self._sweeper.wait()

    def _at_rest(self) -> ParameterStore:
        """The store, whose values nothing changes until the next run."""
        self._wait_for_sweep()
        return self._store

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        self._warming_up = False
        # Steps that were started before count from then on.
        started = self._last_end if self._last_end is not None else time.perf_counter()
        num_finished = 0
        may_begin = max(num_steps, may_begin or 0)
        while self._num_ahead < num_steps:
            if self._sweeper is not None:
                self._sweeper.go_on()
            more = self._next_logs(may_begin - self._num_ahead, interrupted)
            if more is None:
                break
            self._keep(more)
            num_finished += more.num_steps
        if is_interrupted := interrupted():
            self.drain()
        logs = self._ahead
        if logs is not None and logs.num_steps > num_steps and not is_interrupted:
            logs, self._ahead = logs[:num_steps], logs[num_steps:]
        else:
            self._ahead = None
        now = time.perf_counter()
        self._observe(num_finished, now - started)
        self._last_end = None if self.is_idle else now
        return logs

    def _observe(self, num_steps: int, secs: float) -> None:
        """Learns from steps that finished how calls should be."""
        self._sizer.observe(num_steps, secs, warming_up=self._warming_up)

    @abc.abstractmethod
    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        """Waits for the next call to finish, and sets `_warming_up` when it traces a function.

        Args:
            may_begin: how many steps may be in flight, including those that are.

        Returns:
            Logs of the call; None if nothing is in flight and nothing may be started.
        """

    def _keep(self, logs: StepLogs) -> None:
        self._ahead = logs if self._ahead is None else self._ahead + logs

    @property
    def _num_ahead(self) -> int:
        return 0 if self._ahead is None else self._ahead.num_steps

    def drain(self) -> int:
        while (logs := self._in_flight_logs()) is not None:
            self._keep(logs)
        return self._num_ahead

    @property
    def is_idle(self) -> bool:
        return self._num_ahead == 0 and self._num_in_flight == 0

    @property
    def _num_in_flight(self) -> int:
        """Steps that were started and have not finished, as far as is known. Strategies whose calls block have none."""
        return 0

    def _in_flight_logs(self) -> StepLogs | None:
        """Waits for the next call in flight; None if there is none."""
        return None

    def global_step(self) -> int:
        return self._store.counters.global_step()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._store.values.shapes, **self._store.dynamic.shapes}

    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        yield from self._at_rest().values.portions(names)
        yield from self._store.dynamic.read(names)

    def histograms(self) -> dict[str, np.ndarray]:
        self._histograms = self._histograms or Histograms(self._store.values)
        return self._histograms.read()

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        self._at_rest().write(values)
        if GLOBAL_STEP in values:
            self._continue_at(int(values[GLOBAL_STEP]))

    @property
    def by_rows(self) -> frozenset[str]:
        return self._store.files.by_rows

    def next_interval(self, since: int | None) -> int | None:
        return self._at_rest().files.next_interval(since)

    def save(self, prefix: Path, since: DeltaBase | None = None) -> None:
        self._at_rest().files.save(prefix, self._beside, since)

    def begin_save(self, prefix: Path, since: DeltaBase | None = None) -> Future[None]:
        return in_thread(self._at_rest().files.begin_save(prefix, self._beside, since))

    @property
    def _beside(self) -> dict[str, np.ndarray]:
        """What a checkpoint has beside the values."""
        spec = self._prepared.spec
        beside = {
            SEED: np.array(spec.seed, np.int64),
            EPOCHS_BEGIN: np.array([spec.data_begins_at, spec.first_epoch], np.int64),
        }
        return beside if self._splits is None else {**beside, DATA_STATE: np.array(self._splits.state(), object)}

    @property
    def _splits(self) -> Splits | None:
        """What workers read one after the other, if the data may end."""
        return self._prepared.spec.data.splits

    def count_rows(self) -> None:
        self._at_rest().dynamic.count()

    def use_averages(self) -> None:
        self._at_rest().use_averages()

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        self._at_rest().restore(path, deltas)
        self._continue_at(self._store.counters.global_step())

    def _continue_at(self, step: int) -> None:
        """Training continues at another step: the steps before it no longer count."""
        self._ahead = self._last_end = None
        self._sizer.begin_at(step)

    @property
    def warming_up(self) -> bool:
        return self._warming_up


def in_terms_of_tables(error: tf.errors.OpError, plan: PlacementPlan | None) -> tf.errors.OpError:
    """The same error; if an id is not in its table, it names both, not the rows of a server."""
    found = None if plan is None else wrong_id(error.message, plan)
    return error if found is None else tf.errors.InvalidArgumentError(None, None, found)


def no_batch() -> ValueError:
    """The meaning of the end of a dataset, since every dataset is repeated endlessly."""
    return ValueError("the dataset has not a single batch")
