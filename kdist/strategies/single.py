"""`single`: every step in the chief's own process. The plain case that the others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import tensorflow as tf

from kdist._compat.tensorflow import IteratorSpec
from kdist.cluster.spec import CHIEF
from kdist.errors import TaskError
from kdist.strategies.base import TrainingSpec
from kdist.strategies.store_backed import StoreBackedStrategy, in_terms_of_tables, no_batch, prepare
from kdist.strategies.traced_calls import StepLogs


class Single(StoreBackedStrategy):
    """One replica, one process, no servers."""

    name: ClassVar[str] = "single"

    def __init__(self) -> None:
        self._iterator: Iterator[Any] | None = None

    def start(self, spec: TrainingSpec) -> None:
        self._prepared = prepare(spec, num_workers=1)
        self._store = self._prepared.store([""], self._prepared.plan_for_one())
        self._make_dataset = self._prepared.trace_dataset()
        element_spec = self._make_dataset.structured_outputs.element_spec
        self._calls = self._prepared.calls(self._store, IteratorSpec(element_spec))
        self._sizer = self._prepared.sizer()
        self._begin_to_sweep()

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if interrupted():
            return None
        if self._iterator is None:
            step = self.global_step()
            dataset = self._prepared.make_dataset(self._make_dataset, 0, step, self.batches_per_step)
            self._iterator = iter(dataset)
        size = self._sizer.next_size(may_begin)
        self._warming_up |= not self._calls.traced(size)
        function = self._calls.function(size)
        try:
            packed = function(self._iterator).numpy()
        except tf.errors.OutOfRangeError as error:
            raise TaskError(str(CHIEF), no_batch()) from error
        except tf.errors.OpError as error:
            cause = in_terms_of_tables(error, self._prepared.plan_for_one())
            raise TaskError(str(CHIEF), cause) from error
        return self._calls.logs(packed)

    def stop(self) -> None:
        self._iterator = None
