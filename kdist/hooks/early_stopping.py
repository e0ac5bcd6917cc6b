"""`EarlyStopping`: ends training that no longer improves. After `keras.callbacks.EarlyStopping`, by validations.

The best values are kept in a checkpoint, which parameter servers write and read themselves: they never pass the chief.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kdist.config.checks import check_whole_number
from kdist.console import lines
from kdist.hooks.base import Session
from kdist.hooks.monitor import Monitor, MonitoringHook

if TYPE_CHECKING:
    from kdist.run.checkpoint import Checkpoints


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
