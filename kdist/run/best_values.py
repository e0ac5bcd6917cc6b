"""The best value of each validation metric of a run, by which sweeps compare runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Best:
    """The best value of a metric.

    Attributes:
        value: the best one so far; the last one if it is not known which values are better.
        step: the global step of the value.
        mode: `min` or `max`: which values are better; None if it is not known.
    """

    value: float
    step: int
    mode: str | None


class BestValues:
    """Keeps the best value of each metric.

    Args:
        model: its metrics know which values are better.
        earlier: those of the run that is resumed, as in `result.json`.
    """

    def __init__(self, model: keras.Model, earlier: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._model = model
        self.by_name = {name: Best(**best) for name, best in (earlier or {}).items() if best["value"] is not None}

    def forget_after(self, step: int) -> None:
        """Forgets the values of steps after `step`, where the run is resumed: they will be repeated."""
        self.by_name = {name: best for name, best in self.by_name.items() if best.step <= step}

    def add(self, step: int, logs: Mapping[str, Any]) -> None:
        """Adds the validation values of a step, by name; an array has no best value."""
        for name, value in logs.items():
            if isinstance(value, np.ndarray):
                continue
            mode, best = mode_of(self._model, name), self.by_name.get(name)
            if best is None or mode is None or is_better(value, best.value, mode):
                self.by_name[name] = Best(value, step, mode)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The form of `result.json`."""
        return {name: asdict(best) for name, best in self.by_name.items()}


def is_better(value: float, than: float, mode: str) -> bool:
    """Whether a value is better than another one; any number is better than NaN."""
    if math.isnan(value) or math.isnan(than):
        return math.isnan(than) and not math.isnan(value)
    return value > than if mode == "max" else value < than


def mode_of(model: keras.Model, name: str) -> str | None:
    """Which values of a metric are better, `min` or `max`; None if neither Keras nor the metric tells."""
    # Not above: hooks, which --help lists, import this module, and need no Keras for it.
    from kdist._compat.keras import better_is

    if name == "loss" or name.endswith("_loss"):
        return "min"
    for metric in getattr(model, "metrics", []):
        for each in getattr(metric, "metrics", None) or [metric]:
            if each.name == name and (direction := better_is(each)) is not None:
                return "max" if direction == "up" else "min"
    return None
