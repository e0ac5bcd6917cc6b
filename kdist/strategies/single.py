"""`single`: every step in the chief's own process. The plain case that the others are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import IteratorSpec

from kdist.cluster.spec import CHIEF
from kdist.errors import TaskError
from kdist.strategies.base import Program
from kdist.strategies.calls import StepLogs
from kdist.strategies.stored import Placement, StoredStrategy, no_batch, prepare


class Single(StoredStrategy):
    """One replica, one process, no servers."""

    name: ClassVar[str] = "single"

    def __init__(self) -> None:
        self._iterator: Iterator[Any] | None = None

    def start(self, program: Program) -> None:
        self._program = prepare(program, num_workers=1)
        self._store = self._program.store([""], self._program.plan(1, Placement()))
        self._make_dataset = self._program.trace_dataset()
        element_spec = self._make_dataset.structured_outputs.element_spec
        self._calls = self._program.calls(self._store, IteratorSpec(element_spec))
        self._sizer = self._program.sizer()

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        if interrupted():
            return None
        if self._iterator is None:
            arguments = self._program.worker_arguments(0, self.global_step(), self.batches_per_step)
            self._iterator = iter(self._make_dataset(*arguments))
        size = self._sizer.next_size(may_begin)
        self._warming_up |= not self._calls.traced(size)
        function = self._calls.function(size)
        try:
            packed = function(self._iterator).numpy()
        except tf.errors.OutOfRangeError as error:
            raise TaskError(str(CHIEF), no_batch()) from error
        except tf.errors.OpError as error:
            raise TaskError(str(CHIEF), error) from error
        return self._calls.logs(packed)

    def stop(self) -> None:
        self._iterator = None
