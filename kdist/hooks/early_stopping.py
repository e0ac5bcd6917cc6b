"""`EarlyStopping`: ends training that no longer improves. After `keras.callbacks.EarlyStopping`, by validations.

`Monitor` and `MonitoringHook` are for all hooks that compare the values of validations. The best values are kept in a
checkpoint, which parameter servers write and read themselves: they never pass the chief.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kdist.config.checks import check_whole_number
from kdist.console import lines
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, Session
from kdist.hooks.progressive_validation import PREFIX, ProgressiveValidation
from kdist.run.statistics import mode_of

if TYPE_CHECKING:
    from kdist.run.checkpoint import Checkpoints


_MODES = ("auto", "min", "max")


class Monitor:
    """Keeps the best value of one metric of validation, or of progressive validation.

    Args:
        metric: `loss`, or the name of a metric as validation reports it; with `progressive_` before it, as
            `ProgressiveValidation` reports it.
        mode: `min` or `max`: which values are better; `auto` asks the metric.
        min_delta: the smallest improvement that counts; at least 0.
        owner: named in errors, as `EarlyStopping`.

    Attributes:
        best: the best value so far; None before the first.
        is_progressive: whether the metric is one of progressive validation.

    Raises:
        ConfigError: a value is out of range; from `begin`: nothing reports the metric; from `is_better`: there is no
            such metric, or it is not known which of its values are better.
    """

    def __init__(self, metric: str, mode: str, min_delta: float, owner: str) -> None:
        if mode not in _MODES:
            raise ConfigError(f"{owner}.mode={mode}: choose one of {', '.join(_MODES)}")
        if not min_delta >= 0:
            raise ConfigError(f"{owner}.min_delta={min_delta}: must be at least 0")
        self._metric = metric
        self.is_progressive = metric.startswith(PREFIX)
        self._mode = mode
        self._min_delta = min_delta
        self._owner = owner
        self.best: float | None = None

    def begin(self, session: Session) -> None:
        """Forgets the best value: a session begins."""
        self.best = None
        if self.is_progressive and not any(isinstance(hook, ProgressiveValidation) for hook in session.hooks):
            raise ConfigError(
                f"{self._owner}.metric={self._metric}: nothing reports it; add the hook ProgressiveValidation"
            )

    def value(self, logs: Mapping[str, Any]) -> float:
        """The metric's value in the logs of a validation."""
        name = self._metric.removeprefix("val_")
        if name not in logs:
            what = "progressive validation" if self.is_progressive else "validation"
            raise ConfigError(f"{self._owner}.metric={self._metric}: {what} reports {', '.join(logs)}")
        if isinstance(value := logs[name], list):
            raise ConfigError(f"{self._owner}.metric={self._metric}: has {len(value)} values; choose a metric with one")
        return value

    def is_better(self, session: Session, logs: Mapping[str, Any]) -> bool:
        """True if the value improves the best one by more than `min_delta`; then it becomes the best one."""
        value = self.value(logs)
        name = self._metric.removeprefix("val_").removeprefix(PREFIX)
        mode = mode_of(session.spec.model, name) if self._mode == "auto" else self._mode
        if mode is None:
            raise ConfigError(f"{self._owner}.metric={self._metric}: say which values are better: mode=min or mode=max")
        sign = 1 if mode == "max" else -1
        is_gain = self.best is None or sign * (value - self.best) > self._min_delta
        if math.isnan(value) or not is_gain:
            return False
        self.best = value
        return True


class MonitoringHook(Hook, abc.ABC):
    """Judges the values of one metric, of each validation or progressive validation.

    Args:
        monitor: of the metric.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.needs_validation = not monitor.is_progressive

    @abc.abstractmethod
    def judge(self, session: Session, logs: Mapping[str, Any]) -> None:
        """Called with new values, including the metric."""

    def begin(self, session: Session) -> None:
        self._monitor.begin(session)

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        if not self._monitor.is_progressive:
            self.judge(session, logs)

    def after_progressive_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        if self._monitor.is_progressive:
            self.judge(session, logs)


class EarlyStopping(MonitoringHook):
    """Stops when a validation metric has not improved for some validations.

    Args:
        metric: `loss`, or the name of a metric; a leading `val_` is ignored. For `progressive_auc`, only windows of
            `ProgressiveValidation` with new examples count as validations.
        patience: stop after this many validations without an improvement; 0 stops at the first one.
        min_delta: an improvement has to be larger than this.
        mode: `min`, `max`, or `auto` to ask the metric.
        restore_best: whether training ends with the values of the best validation, whatever stops it; they are in
            `early_stopping/` in the run dir until then. A run that resumes knows validations from then on.

    Raises:
        ConfigError: a value is out of range, or nothing validates; from `after_validation`: no such metric.
        CheckpointError: from `after_validation`: values cannot be saved; from `end`: they cannot be restored.
    """

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 0,
        min_delta: float = 0.0,
        mode: str = "auto",
        restore_best: bool = False,
    ) -> None:
        check_whole_number("EarlyStopping.patience", patience, at_least=0)
        super().__init__(Monitor(metric, mode, min_delta, "EarlyStopping"))
        self._patience = patience
        self._restore_best = restore_best
        self._waited = 0
        self._best: tuple[int, Mapping[str, Any]] | None = None

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._waited = 0
        self._best = None

    def judge(self, session: Session, logs: Mapping[str, Any]) -> None:
        if self._monitor.is_better(session, logs):
            self._waited = 0
            if self._restore_best:
                self._keep(session, logs)
            return
        self._waited += 1
        if self._waited >= self._patience:
            session.request_stop("EarlyStopping")

    def end(self, session: Session) -> None:
        # An interrupted run continues later, from where it is.
        if self._best is None or session.interrupted:
            return
        step, logs = self._best
        if step != session.global_step:
            session.restore_values(_kept(session))
            session.print_line(lines.best_line(session.global_step, session.last_step, step))
            if not self._monitor.is_progressive:
                session.publish_validation(logs)

    def _keep(self, session: Session, logs: Mapping[str, Any]) -> None:
        # In the middle of asynchronous training there may be more steps than the hooks have seen.
        step = session.strategy.values.global_step()
        _kept(session).write(step, session.strategy.values)
        _kept(session).keep_only(step)
        self._best = step, dict(logs)


def _kept(session: Session) -> Checkpoints:
    return session.checkpoints.beside("early_stopping")
