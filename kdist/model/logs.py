"""Loss and metrics by name, as Keras's `fit` reports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: A number for each name; nested lists of numbers for a metric whose result has dimensions, such as `F1Score()`.
Logs = dict[str, Any]


def as_logs(results: Mapping[str, Any]) -> Logs:
    """The results of metrics, as tensors or variables. The items of a dict are metrics of their own, as in Keras."""
    logs: Logs = {}
    for name, result in results.items():
        if isinstance(result, Mapping):
            logs |= as_logs(result)
        else:
            logs[name] = np.asarray(result).astype(float).tolist()
    return logs


def scalars(logs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Each number by its name; the items of a list are `f1_score/0`, `f1_score/1` and so on."""
    for name, value in logs.items():
        if isinstance(value, list):
            yield from scalars({f"{name}/{index}": item for index, item in enumerate(value)})
        else:
            yield name, value
