"""The step of a worker between a pull and a push, while a call is traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from kdist._compat.tensorflow import function_of_its_own
from kdist.model.embedding_lookup import sum_duplicates
from kdist.model.replica_step import ReplicaStep
from kdist.model.updates import ReplicaOutput, RunningStep
from kdist.parameters.placement.messages import Change, Gathered, Layout, Message, Pulled
from kdist.parameters.store import ParameterStore
from kdist.strategies.call_logs import CallLogs

#: The next `(batch, seeds)` of a replica.
NextBatch = Callable[[], tuple[Any, tf.Tensor]]

#: Computes a step between a pull and a push: pulled values, the next batches, metrics to add to -> the step in phases,
#: most often one.
Compute = Callable[[Pulled, NextBatch, list[tf.Tensor]], RunningStep]


def shared_step(replica_step: ReplicaStep, store: ParameterStore) -> Compute:
    """The step of a replica whose gradients are averaged with those of others before they are clipped."""

    def compute(pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        return store.run_step(replica_step, pulled, *next_batch(), metrics)

    return compute


def own_step(replica_step: ReplicaStep, store: ParameterStore, local_steps: int) -> Compute:
    """The step of a replica that pushes its own gradients, clipped; several batches can make one step.

    After DistBelief's Downpour SGD (Dean et al., 2012) with n_fetch = n_push: a worker continues by plain gradient
    descent on a copy, adds up its gradients, and pushes their sum. With more than one batch this is a
    different algorithm than asynchronous training, with fewer bytes and more staleness; for plain SGD with a single
    worker it is the same.
    """
    updates = replica_step.updates

    def clipped(output: ReplicaOutput) -> ReplicaOutput:
        return replace(output, gradients=updates.clip(output.gradients, output.phase))

    def one(pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        running = store.run_step(replica_step, pulled, *next_batch(), metrics)
        fresh: Any = None
        for _ in range(updates.num_phases):
            fresh = yield clipped(running.send(fresh))

    def several(pulled: Pulled, next_batch: NextBatch, metrics: list[tf.Tensor]) -> RunningStep:
        sums = output = clipped(next(store.run_step(replica_step, pulled, *next_batch(), metrics)))
        learning_rate = tf.identity(store.learning_rate(pulled.global_step))
        for _ in range(local_steps - 1):
            pulled = replace(
                pulled,
                trainable=[_moved(*pair, learning_rate) for pair in zip(pulled.trainable, output.gradients)],
                state=_newer(pulled.state, output.state),
            )
            output = clipped(next(store.run_step(replica_step, pulled, *next_batch(), output.metrics)))
            sums = replace(
                output,
                gradients=[
                    _sum(*pair, is_row_wise=i in replica_step.row_wise)
                    for i, pair in enumerate(zip(sums.gradients, output.gradients))
                ],
                state=_newer(sums.state, output.state),
                num_examples=sums.num_examples + output.num_examples,
                overflow=None if output.overflow is None else tf.maximum(sums.overflow, output.overflow),
            )
        yield sums

    return several if local_steps > 1 else one


def _moved(value: Any, gradient: Change, learning_rate: tf.Tensor) -> Any:
    """A value after one step of gradient descent; a table whose rows are fetched is read anew in every step."""
    if gradient is None or value is None:
        return value
    learning_rate = tf.cast(learning_rate, value.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        changes = learning_rate * tf.cast(gradient.values, value.dtype)
        return tf.tensor_scatter_nd_sub(value, gradient.indices[:, None], changes)
    return value - learning_rate * tf.cast(gradient, value.dtype)


def _newer(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [before if after is None else after for before, after in zip(old, new)]


def _sum(one: Change, other: Change, *, is_row_wise: bool) -> Change:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.Tensor):
        return one + other
    both = tf.IndexedSlices(tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0))
    return sum_duplicates(both) if is_row_wise else both


class WorkerStep:
    """A self-contained step as one function that all steps of all calls run, on any worker.

    Unrolled, the operations of a large model would be in a call as often as it has steps, and tasks would take as many
    times longer to prepare it. If such a function fails, TensorFlow may say no more than that the call was cancelled,
    so whoever runs it must have another way to learn the error.

    Args:
        compute: the step between a pull and a push; it has one phase.
        pack: its output, the values it began with -> the messages that travel to the servers.

    Attributes:
        trace_secs: what tracing the step has taken so far.
    """

    def __init__(
        self,
        store: ParameterStore,
        logs: CallLogs,
        compute: Compute,
        pack: Callable[[ReplicaOutput, Pulled], list[Message]],
    ) -> None:
        self.trace_secs = 0.0
        self._store = store
        self._logs = logs
        self._compute = compute
        self._pack = pack
        self._functions: dict[bool, Callable[..., Any]] = {}
        self._layouts: list[Layout] = []

    def __call__(
        self,
        gathered: Gathered,
        batch: Any,
        seeds: tf.Tensor,
        before: list[tf.Tensor] | None = None,
        *,
        unrolled: bool = False,
    ) -> tuple[list[Message], list[tf.Tensor], tf.Tensor]:
        """Runs the step on gathered values, on the device of the caller.

        Args:
            before: the number of examples and the metrics to add to; None at first.
            unrolled: whether its operations are those of the call, which then reports their errors.

        Returns:
            The messages, the number of examples and the metrics after it, and both as a row for `CallLogs.pack`.
        """
        given = [] if before is None else before
        if unrolled:
            packed, after, row = self._traced(gathered, given, batch, seeds)
        else:
            # Not constants: TensorFlow would make another function for each call of one.
            arguments = [[tf.identity(tensor) for tensor, _ in gathered.fused], given, batch, seeds]
            if bool(given) not in self._functions:
                self._functions[bool(given)] = self._function(gathered, arguments)
            packed, after, row = self._functions[bool(given)](*arguments)
        return list(zip(packed, self._layouts)), after, row

    def _function(self, gathered: Gathered, arguments: list[Any]) -> Callable[..., Any]:
        def step(values: list[tf.Tensor], before: list[tf.Tensor], batch: Any, seeds: tf.Tensor) -> Any:
            arrived = [(value, layout) for value, (_, layout) in zip(values, gathered.fused)]
            # The step does not need the time: otherwise it would not be self-contained.
            return self._traced(Gathered({}, arrived, tf.zeros([], tf.int64)), before, batch, seeds)

        specs = tf.nest.map_structure(tf.type_spec_from_value, arguments)
        # Of no task: each runs it on its own device.
        with tf.device(None):
            function: Callable[..., Any] = function_of_its_own(step).get_concrete_function(*specs)
        return function

    def _traced(self, gathered: Gathered, before: list[tf.Tensor], batch: Any, seeds: tf.Tensor) -> Any:
        began = time.perf_counter()
        pulled = self._store.pull(gathered)
        num_before, *metrics = before or [tf.constant(0), *self._logs.initial_metrics()]
        output = next(self._compute(pulled, lambda: (batch, seeds), metrics))
        after = [num_before + output.num_examples, *output.metrics]
        messages = self._pack(output, pulled)
        self._layouts = [layout for _, layout in messages]
        result = [tensor for tensor, _ in messages], after, self._logs.fuse(after)
        self.trace_secs += time.perf_counter() - began
        return result
