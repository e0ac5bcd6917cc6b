"""`Monitor`: whether a validation value has improved. After `keras.callbacks.MonitorCallback`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kdist.errors import ConfigError
from kdist.hooks.base import Session
from kdist.run.best_values import mode_of

_MODES = ("auto", "min", "max")


class Monitor:
    """Keeps the best value of one validation metric.

    Args:
        metric: `loss`, or the name of a metric as validation reports it.
        mode: `min` or `max`: which values are better; `auto` asks the metric.
        min_delta: the smallest improvement that counts; at least 0.
        owner: named in errors, as `EarlyStopping`.

    Attributes:
        best: the best value so far; None before the first.

    Raises:
        ConfigError: a value is out of range; from `is_better`: no such metric, or it is not known which of its values
            are better.
    """

    def __init__(self, metric: str, mode: str, min_delta: float, owner: str) -> None:
        if mode not in _MODES:
            raise ConfigError(f"{owner}.mode={mode}: choose one of {', '.join(_MODES)}")
        if not min_delta >= 0:
            raise ConfigError(f"{owner}.min_delta={min_delta}: must be at least 0")
        self._metric = metric
        self._mode = mode
        self._min_delta = min_delta
        self._owner = owner
        self.best: float | None = None

    def value(self, logs: Mapping[str, Any]) -> float:
        """The metric's value in validation logs."""
        name = self._metric.removeprefix("val_")
        if name not in logs:
            raise ConfigError(f"{self._owner}.metric={self._metric}: validation reports {', '.join(logs)}")
        if isinstance(value := logs[name], list):
            raise ConfigError(f"{self._owner}.metric={self._metric}: has {len(value)} values; choose a metric with one")
        return value

    def is_better(self, session: Session, logs: Mapping[str, Any]) -> bool:
        """Whether the value improves the best one so far by more than `min_delta`; if so, it becomes the best one."""
        value = self.value(logs)
        mode = mode_of(session.spec.model, self._metric.removeprefix("val_")) if self._mode == "auto" else self._mode
        if mode is None:
            raise ConfigError(f"{self._owner}.metric={self._metric}: say which values are better: mode=min or mode=max")
        sign = 1 if mode == "max" else -1
        is_gain = self.best is None or sign * (value - self.best) > self._min_delta
        if math.isnan(value) or not is_gain:
            return False
        self.best = value
        return True
