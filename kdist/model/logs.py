"""Loss and metrics by name, as Keras's `fit` reports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

#: A number for each name; an array for a metric whose result has several, such as `F1Score()`.
Logs = dict[str, Any]


def flat(results: Mapping[str, Any]) -> dict[str, Any]:
    """The items of dicts as results of their own, as in Keras."""
    logs: dict[str, Any] = {}
    for name, result in results.items():
        logs |= flat(result) if isinstance(result, Mapping) else {name: result}
    return logs


def as_logs(results: Mapping[str, Any]) -> Logs:
    """The results of metrics, as tensors or variables."""
    arrays = {name: np.asarray(result) for name, result in flat(results).items()}
    return {name: float(array.item()) if array.size == 1 else array for name, array in arrays.items()}


def scalars(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each number by its name; the items of an array, or a list, are `f1_score/0`, `f1_score/1` and so on.

    In the record of a run, None stands for what is no number.
    """
    for name, value in logs.items():
        if isinstance(value, (list, np.ndarray)):
            yield from scalars({f"{name}/{index}": item for index, item in enumerate(value)})
        else:
            yield name, None if value is None else float(value)
