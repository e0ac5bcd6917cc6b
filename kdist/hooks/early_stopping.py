"""`EarlyStopping`: ends training that gets no better. After `keras.callbacks.EarlyStopping`, by validations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kdist.checks import check_whole_number
from kdist.hooks.base import Hook
from kdist.hooks.monitor import Monitor

if TYPE_CHECKING:
    from kdist.session import TrainSession


class EarlyStopping(Hook):
    """Stops when a validation metric has not got better for some validations.

    Args:
        metric: `loss`, or the name of a metric; `val_` before it is left out.
        patience: stop after so many validations without a better value; 0 stops at the first one.
        min_delta: what counts as better is better by more than this.
        mode: `min`, `max`, or `auto` for what the metric says of itself.

    Raises:
        ConfigError: a value out of range, or a fit without validation data; from `after_validation`: no such metric.
    """

    needs_validation = True

    def __init__(self, metric: str = "loss", patience: int = 0, min_delta: float = 0.0, mode: str = "auto") -> None:
        check_whole_number("EarlyStopping.patience", patience, at_least=0)
        self._arguments = (metric, mode, min_delta, "EarlyStopping")
        self._monitor = Monitor(*self._arguments)
        self._patience = patience
        self._waited = 0

    def begin(self, session: TrainSession) -> None:
        self._monitor = Monitor(*self._arguments)
        self._waited = 0

    def after_validation(self, session: TrainSession, logs: Mapping[str, float]) -> None:
        if self._monitor.is_better(session, logs):
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            session.request_stop("EarlyStopping")

    def idle_in(self, step: int) -> int | None:
        return None
