"""`StepLogs`: the reports of steps. `CallLogs`: how a call brings them to the chief, in one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.model.metrics import MetricReader, MetricRows
from kdist.model.replica_step import ReplicaStep
from kdist.parameters.placement.messages import fuse
from kdist.strategies.gradient_counts import GradientCounts


@dataclass(frozen=True)
class StepLogs:
    """The reports of some steps. Logs of different steps can be joined and split.

    Attributes:
        num_examples: int array `[num_steps]`, how many examples each used.
        staleness: int array `[num_steps]`; for each update how many others were applied between its pull and its
            push.
        metrics: loss and metrics of each step.
        gradient_counts: for each step the fate of the workers' gradients, by worker index; empty without workers.
    """

    num_examples: np.ndarray
    staleness: np.ndarray
    metrics: MetricRows
    gradient_counts: tuple[Mapping[int, GradientCounts], ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of updates applied."""
        return len(self.staleness)

    def __add__(self, later: StepLogs) -> StepLogs:
        return StepLogs(
            np.concatenate([self.num_examples, later.num_examples]),
            np.concatenate([self.staleness, later.staleness]),
            self.metrics + later.metrics,
            self.gradient_counts + later.gradient_counts,
        )

    def __getitem__(self, steps: slice) -> StepLogs:
        return StepLogs(
            self.num_examples[steps], self.staleness[steps], self.metrics[steps], self.gradient_counts[steps]
        )

    def beside(self, other: StepLogs) -> StepLogs:
        """The joint report of two replicas on the same synchronous steps."""
        return StepLogs(self.num_examples + other.num_examples, self.staleness, self.metrics.beside(other.metrics))


class CallLogs:
    """Packs the logs of a call into one tensor, because every fetched tensor costs a round trip."""

    def __init__(self, replica_step: ReplicaStep) -> None:
        self._variables = replica_step.metrics
        self._reader = MetricReader(replica_step.model, replica_step.returned, replica_step.loss_counts)

    def initial_metrics(self) -> list[tf.Tensor]:
        """The metric variables' values before a step; called while a call is traced."""
        return [
            tf.constant(initial, variable.dtype)
            for initial, variable in zip(self._reader.initial_values, self._variables)
        ]

    @staticmethod
    def pack(staleness: tf.Tensor, rows: Sequence[Sequence[Any]]) -> tf.Tensor:
        """A row of float64 for each step: its staleness, its number of examples, its metrics."""
        fused = CallLogs.fuse([tensor for row in rows for tensor in row])
        return tf.concat([tf.cast(staleness, tf.float64)[:, None], tf.reshape(fused, [len(rows), -1])], 1)

    @staticmethod
    def fuse(tensors: Sequence[Any]) -> tf.Tensor:
        """Tensors of a row as one, which may stand for them in `pack`: float64 `[n]`."""
        return fuse([tf.cast(tensor, tf.float64) for tensor in tensors])

    def unpack(self, packed: np.ndarray) -> StepLogs:
        """Undoes `pack`."""
        shapes = [initial.shape for initial in self._reader.initial_values]
        sizes = [1, 1, *(math.prod(shape) for shape in shapes)]
        staleness, num_examples, *parts = np.split(packed, np.cumsum(sizes)[:-1], axis=1)
        values = tuple(part.reshape(len(packed), *shape) for part, shape in zip(parts, shapes))
        whole = [column[:, 0].astype(np.int64) for column in (num_examples, staleness)]
        return StepLogs(whole[0], whole[1], MetricRows(self._reader, values))

    @staticmethod
    def join(logs: Sequence[StepLogs]) -> StepLogs:
        """The joint report of all replicas on the same synchronous steps."""
        together = reduce(StepLogs.beside, logs)
        return replace(together, metrics=together.metrics.count_as_keras(together.num_examples))
