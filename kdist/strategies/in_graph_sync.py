"""Synchronous steps in which every worker takes part, several of them as one function over all tasks.

What TF1 called in-graph replication. Nothing asks for permission and nothing is told that a step is over: a server
applies when the last gradient has arrived, and a worker begins when the new parameters have. The dependencies of the
graph are all the synchronisation there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kdist.cluster.spec import Task
from kdist.data.worker_dataset import next_of
from kdist.model.replica_step import ReplicaStep, batch_size_of
from kdist.parameters.aggregation import GradientAggregator
from kdist.parameters.store import ParameterStore
from kdist.strategies.traced_calls import CallLogs


class InGraphSyncCalls:
    """Traces calls of a given number of steps of all workers, once per number.

    Args:
        replica_step: the step of the model.
        store: where values come from.
        aggregator: where gradients go.
        logs: how a call returns what it logs.
        iterator_spec: type of the iterators over `(batch, seeds)`, one per worker.
        shares: for each worker how many gradients of one step it computes.
    """

    def __init__(
        self,
        replica_step: ReplicaStep,
        store: ParameterStore,
        aggregator: GradientAggregator,
        logs: CallLogs,
        iterator_spec: tf.TypeSpec,
        shares: Sequence[int],
    ) -> None:
        self._replica_step = replica_step
        self._store = store
        self._aggregator = aggregator
        self._logs = logs
        self._iterator_spec = iterator_spec
        self._shares = list(shares)
        self._functions: dict[int, Callable[..., list[tf.Tensor]]] = {}

    def traced(self, num_steps: int) -> bool:
        """Whether a call of that many steps exists already."""
        return num_steps in self._functions

    def function(self, num_steps: int) -> Callable[..., list[tf.Tensor]]:
        """The call of `num_steps` steps: list of iterators -> for each worker what `CallLogs.pack` made of its part."""
        if num_steps not in self._functions:

            def call(iterators: list[Any]) -> list[tf.Tensor]:
                return self._run_steps(iterators, num_steps)

            specs = [self._iterator_spec] * len(self._shares)
            self._functions[num_steps] = tf.function(call, autograph=False).get_concrete_function(specs)
        return self._functions[num_steps]

    def _run_steps(self, iterators: list[Any], num_steps: int) -> list[tf.Tensor]:
        workers = range(len(self._shares))
        rows: list[list[list[Any]]] = [[] for _ in workers]
        for _ in range(num_steps):
            gathered = self._store.gather()
            results = []
            for worker in workers:
                with tf.device(Task("worker", worker).device):
                    pulled = self._store.pull(gathered)
                    metrics, num_examples = self._logs.initial_metrics(), tf.constant(0)
                    for _ in range(self._shares[worker]):
                        batch, seeds = next_of(iterators[worker])
                        output = self._replica_step(pulled.trainable, pulled.state, metrics, seeds, batch)
                        results.append(self._aggregator.bring(output.gradients, output.state, pulled))
                        metrics = output.metrics
                        num_examples += batch_size_of(batch)
                    rows[worker].append([num_examples, *metrics])
            self._aggregator.apply_mean(results)
        packed = []
        for worker in workers:
            with tf.device(Task("worker", worker).device):
                # Nothing is ever stale here.
                staleness = tf.zeros([num_steps], tf.int64)
                packed.append(self._logs.pack(staleness, rows[worker]))
        return packed
