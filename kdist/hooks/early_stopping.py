"""`EarlyStopping`: ends training that no longer improves. After `keras.callbacks.EarlyStopping`, by validations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdist.config.checks import check_whole_number
from kdist.hooks.base import Hook, Session
from kdist.hooks.monitor import Monitor


class EarlyStopping(Hook):
    """Stops when a validation metric has not improved for some validations.

    Args:
        metric: `loss`, or the name of a metric; a leading `val_` is ignored.
        patience: stop after this many validations without an improvement; 0 stops at the first one.
        min_delta: an improvement has to be larger than this.
        mode: `min`, `max`, or `auto` to ask the metric.

    Raises:
        ConfigError: a value is out of range, or there is no validation data; from `after_validation`: no such metric.
    """

    needs_validation = True

    def __init__(self, metric: str = "loss", patience: int = 0, min_delta: float = 0.0, mode: str = "auto") -> None:
        check_whole_number("EarlyStopping.patience", patience, at_least=0)
        self._monitor = Monitor(metric, mode, min_delta, "EarlyStopping")
        self._patience = patience
        self._waited = 0

    def begin(self, session: Session) -> None:
        self._monitor.best = None
        self._waited = 0

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        if self._monitor.is_better(session, logs):
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            session.request_stop("EarlyStopping")
