"""Synchronous steps in which every worker takes part, several of them as one function over all tasks.

What TF1 called in-graph replication. Nothing asks for permission and nothing is told that a step is over: a server
applies when the last gradient has arrived, and a worker begins when the new parameters have. The dependencies of the
graph are all the synchronisation there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from kdist.cluster.spec import Task
from kdist.data.base import next_of
from kdist.dispatch.connection import OWN_DEVICE, compute_device
from kdist.model.replica_step import ReplicaStep
from kdist.model.updates import ReplicaOutput, RunningStep
from kdist.parameters.aggregation import Contribution, GradientAggregator
from kdist.parameters.placement.messages import Pulled
from kdist.parameters.store import ParameterStore
from kdist.strategies.call_logs import CallLogs
from kdist.strategies.calls import Calls
from kdist.strategies.worker_step import WorkerStep, shared_step


@dataclass(eq=False)
class InGraphSyncCalls(Calls):
    """Calls of all workers: list of iterators -> the packed logs of each worker, here, see `CallLogs.pack`.

    Attributes:
        iterator_spec: type of the iterators over `(batch, seeds)`, one per worker.
        shares: the number of gradients of one step of each worker that takes part; 1 if steps have phases.
    """

    replica_step: ReplicaStep
    store: ParameterStore
    aggregator: GradientAggregator
    logs: CallLogs
    iterator_spec: tf.TypeSpec
    shares: Mapping[int, int]

    def _trace(self, num_steps: int) -> tf.types.experimental.ConcreteFunction:
        specs = [self.iterator_spec] * len(self.shares)
        return tf.function(partial(self._run_steps, num_steps), autograph=False).get_concrete_function(specs)

    def _run_steps(self, num_steps: int, iterators: list[Any]) -> list[tf.Tensor]:
        rows: dict[int, list[list[Any]]] = {worker: [] for worker in self.shares}
        run_step = self._run_step if self._worker_step is None else partial(self._run_worker_step, self._worker_step)
        for _ in range(num_steps):
            for worker, row in run_step(dict(zip(self.shares, iterators))).items():
                rows[worker].append(row)
        packed = []
        for worker in self.shares:
            with tf.device(compute_device(Task("worker", worker))):
                # Nothing is ever stale here.
                staleness = tf.zeros([num_steps], tf.int64)
                packed.append(self.logs.pack(staleness, rows[worker]))
        # Fetching them afterwards would take a round trip for each worker.
        with tf.device(OWN_DEVICE):
            return [tf.identity(logs) for logs in packed]

    @cached_property
    def _worker_step(self) -> WorkerStep | None:
        """The function that all steps of all workers run; None if they cannot."""
        if not self.replica_step.is_self_contained:
            return None
        return WorkerStep(self.store, self.logs, shared_step(self.replica_step, self.store), self.aggregator.pack)

    def _run_worker_step(self, step: WorkerStep, iterators: Mapping[int, Any]) -> dict[int, list[Any]]:
        """One step of all workers, for which each calls the same function; see `_run_step`."""
        gathered = self.store.gather()
        results: list[Contribution] = []
        rows: dict[int, list[Any]] = {}
        for worker, share in self.shares.items():
            with tf.device(compute_device(Task("worker", worker))):
                counted: list[tf.Tensor] | None = None
                for _ in range(share):
                    batch, seeds = next_of(iterators[worker])
                    messages, counted, row = step(gathered, batch, seeds, counted)
                    results.append(self.aggregator.send_packed(messages))
                rows[worker] = [row]
        self.aggregator.apply_mean(results)
        return rows

    def _run_step(self, iterators: Mapping[int, Any]) -> dict[int, list[Any]]:
        """One step of all workers; for each the number of examples and the metrics."""
        gathered = self.store.gather()
        pulled: dict[int, Pulled] = {}
        running: dict[int, list[RunningStep]] = {worker: [] for worker in self.shares}
        outputs: dict[int, list[ReplicaOutput]] = {}
        for phase, again in enumerate(self.store.updates.pulled_again):
            if phase:
                gathered = self.store.gather(again)
            results = []
            for worker, share in self.shares.items():
                with tf.device(compute_device(Task("worker", worker))):
                    fresh: Any = self.store.pull_again(phase, gathered) if phase else None
                    if not phase:
                        pulled[worker] = self.store.pull(gathered)
                    outputs[worker] = []
                    metrics = self.logs.initial_metrics()
                    for i in range(share):
                        if not phase:
                            batch, seeds = next_of(iterators[worker])
                            step = self.store.run_step(self.replica_step, pulled[worker], batch, seeds, metrics)
                            running[worker].append(step)
                        output = running[worker][i].send(fresh)
                        results.append(self.aggregator.send(output, pulled[worker]))
                        outputs[worker].append(output)
                        metrics = output.metrics
            self.aggregator.apply_mean(results, phase)
        rows = {}
        for worker, of_worker in outputs.items():
            with tf.device(compute_device(Task("worker", worker))):
                num_examples = tf.add_n([tf.convert_to_tensor(output.num_examples) for output in of_worker])
                rows[worker] = [num_examples, *of_worker[-1].metrics]
        return rows
