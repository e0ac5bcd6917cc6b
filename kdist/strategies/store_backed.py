"""What strategies with a `ParameterStore` share: running steps, reading and writing the store."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import tensorflow as tf

from kdist.data.splits import Splits
from kdist.model.names import DATA_STATE, EPOCHS_BEGIN, SEED
from kdist.parameters.placement.plan import PlacementPlan, wrong_id
from kdist.parameters.store import ParameterStore
from kdist.strategies.base import Strategy
from kdist.strategies.prepared_training import PreparedTraining
from kdist.strategies.sweeper import Sweeper
from kdist.strategies.traced_calls import CallSizer, StepLogs
from kdist.strategies.values import StoreValues, Values
from kdist.threads import in_thread

T = TypeVar("T")


class StoreBackedStrategy(Strategy):
    """A strategy that keeps its values in a `ParameterStore`. Subclasses set `_prepared` and `_sizer` in `start`."""

    _prepared: PreparedTraining
    _sizer: CallSizer
    _values: Values
    #: Logs of finished steps that `run` has not returned yet.
    _ahead: StepLogs | None = None
    #: When the last run ended, if it left steps in flight.
    _last_end: float | None = None
    _sweeper: Sweeper | None = None

    def _hold(self, stores: Sequence[ParameterStore]) -> None:
        """Keeps the values in these stores, which are alike; rows of dynamic tables are evicted from now on."""
        self._store = stores[0]
        self._values = StoreValues(stores, self, self._beside, self._have_set)
        if (sweep := self._store.sweep) is not None:
            self._sweeper = Sweeper(sweep, partial(self.start_aside, kind="sweep"), self._outcome)

    def at_rest(
        self, function: Callable[[], T], kind: Hashable = None, *, traces: bool = False, of_files: bool = False
    ) -> T:
        """See `Guard`."""
        self._wait_for_sweep()
        return function()

    def start_aside(self, function: Callable[[], T], kind: Hashable) -> Future[T]:
        """See `Guard`."""
        return in_thread(function)

    def wait_for(self, outcome: Future[T]) -> T:
        """See `Guard`."""
        return self._outcome(outcome)

    def _outcome(self, started: Future[T]) -> T:
        return started.result()

    def _wait_for_sweep(self) -> None:
        if self._sweeper is not None:
            self._sweeper.wait()

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        self.warming_up = False
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
        self._sizer.observe(num_steps, secs, warming_up=self.warming_up)

    @abc.abstractmethod
    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        """Waits for the next call to finish, and sets `warming_up` when it traces a function.

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

    @property
    def values(self) -> Values:
        return self._values

    def _beside(self) -> dict[str, np.ndarray]:
        """What a checkpoint has beside the values."""
        spec = self._prepared.spec
        beside = {
            SEED: np.array(spec.seed, np.int64),
            EPOCHS_BEGIN: np.array([spec.data_begins_at, spec.first_epoch], np.int64),
        }
        state = spec.data.state()
        return beside if state is None else {**beside, DATA_STATE: np.array(state, object)}

    @property
    def _splits(self) -> Splits | None:
        """What workers read one after the other, if the data may end."""
        return self._prepared.spec.data.splits

    def _have_set(self, global_step: int | None) -> None:
        """Values were set, perhaps the global step among them."""
        if global_step is not None:
            self._continue_at(global_step)

    def _continue_at(self, step: int) -> None:
        """Training continues at another step: the steps before it no longer count."""
        self._ahead = self._last_end = None
        self._sizer.begin_at(step)


def in_terms_of_tables(error: tf.errors.OpError, plan: PlacementPlan | None) -> tf.errors.OpError:
    """The same error; if an id is not in its table, it names both, not the rows of a server."""
    found = None if plan is None else wrong_id(error.message, plan)
    return error if found is None else tf.errors.InvalidArgumentError(None, None, found)


def no_batch() -> ValueError:
    """The meaning of the end of a dataset, since every dataset is repeated endlessly."""
    return ValueError("the dataset has not a single batch")
