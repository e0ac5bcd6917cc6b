"""Calls of one gradient each, and the application of several: synchronous training whose waiting the chief does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kdist._compat.first_call_lock import fetch
from kdist._compat.tensorflow import function_for_tasks
from kdist.data.worker_dataset import next_of
from kdist.model.replica_step import ReplicaStep
from kdist.parameters.aggregation import Contribution, GradientAggregator
from kdist.parameters.store import ParameterStore
from kdist.strategies.local_steps import one_step
from kdist.strategies.traced_calls import CallLogs


@dataclass(frozen=True)
class Gradient:
    """What a call of a worker results: tensors on the servers, and what it logged."""

    contribution: Contribution
    packed: np.ndarray


class GradientCalls:
    """Traces both kinds of function when they are first needed.

    Args:
        replica_step: the step of the model.
        store: where values come from.
        aggregator: keeps and applies the gradients.
        logs: what a call returns.
        iterator_spec: type of the iterator over `(batch, seeds)` that a call takes.
        before_tracing: called before a function is traced.
    """

    def __init__(
        self,
        replica_step: ReplicaStep,
        store: ParameterStore,
        aggregator: GradientAggregator,
        logs: CallLogs,
        iterator_spec: Any,
        before_tracing: Callable[[], None],
    ) -> None:
        self._replica_step = replica_step
        self._store = store
        self._aggregator = aggregator
        self._logs = logs
        self._iterator_spec = iterator_spec
        self._before_tracing = before_tracing
        self._compute: tf.types.experimental.ConcreteFunction | None = None
        self._applies: dict[int, tf.types.experimental.ConcreteFunction] = {}

    def compute(self) -> Callable[[Any], Gradient]:
        """What a worker calls with its iterator: computes one gradient."""
        function = self._traced_compute()

        def call(iterator: Any) -> Gradient:
            *contribution, packed = function(iterator)
            return Gradient(contribution, fetch(packed))

        return call

    def apply(self, size: int) -> tf.types.experimental.ConcreteFunction:
        """Applies the mean of `size` contributions; returns the new global step."""
        if size not in self._applies:
            self._before_tracing()
            specs = [tf.TensorSpec(s.shape, s.dtype) for s in self._traced_compute().structured_outputs[:-1]]

            def apply(contributions: list[Contribution]) -> tf.Tensor:
                return self._aggregator.apply_mean(contributions)

            self._applies[size] = tf.function(apply, autograph=False).get_concrete_function([specs] * size)
        return self._applies[size]

    def _traced_compute(self) -> tf.types.experimental.ConcreteFunction:
        if self._compute is None:
            self._before_tracing()
            self._compute = function_for_tasks(self._one_gradient, self._iterator_spec)
        return self._compute

    def _one_gradient(self, iterator: Any) -> list[tf.Tensor]:
        pulled = self._store.pull()
        compute = one_step(self._replica_step, self._store)
        output = next(compute(pulled, lambda: next_of(iterator), self._logs.initial_metrics()))
        contribution = self._aggregator.bring(output, pulled)
        # In place of the staleness it returns the step of its parameters; the chief knows how stale that is.
        return [*contribution, self._logs.pack(pulled.global_step[None], [[output.num_examples, *output.metrics]])]
