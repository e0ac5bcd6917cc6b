"""`single`: every step in the chief's own process. The plain case that the others are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import tensorflow as tf

from kdist.cluster.spec import CHIEF
from kdist.data.base import iterator_spec
from kdist.data.splits import NothingToRead
from kdist.errors import TaskError
from kdist.strategies.base import TrainingSpec
from kdist.strategies.call_logs import StepLogs
from kdist.strategies.calls import UnrolledCalls, WorkerIterators
from kdist.strategies.on_store import StoreStrategy
from kdist.strategies.prepared_training import in_terms_of_tables, no_batch, prepare


class Single(StoreStrategy):
    """One replica, one process, no servers."""

    name: ClassVar[str] = "single"

    def __init__(self) -> None:
        self._iterators = WorkerIterators(self._dataset)

    def start(self, spec: TrainingSpec) -> None:
        self._prepared = prepare(spec, num_workers=1)
        self._hold([self._prepared.store([""], self._prepared.plan_for_one())])
        self._make_dataset = self._prepared.trace_dataset()
        self._calls = UnrolledCalls(self._prepared.replica_step, self._store, iterator_spec(self._make_dataset))
        self._sizer = self._prepared.sizer()
        self._sizer.go_by(self._calls.trace_secs, shares_step=self._calls.shares_step)

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if interrupted():
            return None
        if self._splits is not None:
            self._splits.look()
        size = self._sizer.next_size(may_begin)
        self.warming_up |= not self._calls.traced(size)
        function = self._calls.function(size)
        try:
            packed = self._iterators.read(0, self._splits, lambda iterator: function(iterator).numpy())
        except NothingToRead:
            return None
        except tf.errors.OutOfRangeError as error:
            raise TaskError(str(CHIEF), no_batch()) from error
        except tf.errors.OpError as error:
            cause = in_terms_of_tables(error, self._prepared.plan_for_one())
            raise TaskError(str(CHIEF), cause) from error
        return self._calls.logs.unpack(packed)

    def stop(self) -> None:
        self._iterators.clear()
