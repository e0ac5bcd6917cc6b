"""Exact metrics of distributed steps: workers sum from zero, the chief adds the sums and asks Keras for the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import keras
import numpy as np


class MetricReader:
    """Turns summed metric variables of a compiled, built model into the logs that Keras would show.

    Args:
        model: the chief's own model; its metric variables are overwritten by `logs`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        model.reset_metrics()
        self.initial_values = [variable.numpy() for variable in model.metrics_variables]
        self.aggregations = [variable.aggregation for variable in model.metrics_variables]

    def logs(self, values: Sequence[np.ndarray]) -> dict[str, float]:
        """`{"loss": ..., "accuracy": ...}` for the given values of the metric variables."""
        for variable, value in zip(self._model.metrics_variables, values):
            variable.assign(value.astype(variable.dtype))
        results = self._model.get_metrics_result()
        return {name: _as_number(value) for name, value in results.items()}


@dataclass(frozen=True)
class MetricTotals:
    """Metrics over some steps. Totals of different steps add up: `a + b` is what one worker would have counted.

    Attributes:
        reader: makes logs of the values.
        values: the model's metric variables after those steps, having started from their initial values.
    """

    reader: MetricReader
    values: tuple[np.ndarray, ...]

    def __add__(self, other: MetricTotals) -> MetricTotals:
        merged = [
            _merge(mine, others, initial, aggregation)
            for mine, others, initial, aggregation in zip(
                self.values, other.values, self.reader.initial_values, self.reader.aggregations
            )
        ]
        return MetricTotals(self.reader, tuple(merged))

    @cached_property
    def logs(self) -> dict[str, float]:
        """The loss and metrics as Keras names and computes them."""
        return self.reader.logs(self.values)


def _merge(mine: np.ndarray, others: np.ndarray, initial: np.ndarray, aggregation: str) -> np.ndarray:
    if aggregation == "mean":
        return (mine + others) / 2
    if aggregation == "only_first_replica":
        return others
    # "sum", and "none", which metrics written before Keras 3.3 have: counts and totals add up.
    return mine + others - initial


def _as_number(value: object) -> float:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else float(array.mean())
