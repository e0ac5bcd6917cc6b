"""Hooks that compare a metric of validations: `EarlyStopping` and `BestCheckpoint`, with their base `MonitoringHook`.

The best values are kept in a checkpoint, which parameter servers write and read themselves: they never pass the chief.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kdist.config.checks import check_one_of, check_whole_number
from kdist.console import lines
from kdist.errors import CheckpointError, ConfigError
from kdist.hooks.base import Hook, Session
from kdist.hooks.progressive_validation import PREFIX, ProgressiveValidation
from kdist.log import warn
from kdist.run.statistics import mode_of
from kdist.storage.files import BEST, EARLY_STOPPING, write_whole

if TYPE_CHECKING:
    from kdist.run.checkpoint import Checkpoints

_RECORD = "validation.json"


class MonitoringHook(Hook, abc.ABC):
    """Judges one metric of each validation or progressive validation, and keeps its best value.

    The arguments are those of `EarlyStopping`.

    Attributes:
        best: the best value so far; None before the first.

    Raises:
        ConfigError: a value is out of range; from `begin`: nothing reports the metric; from `is_better`: there is no
            such metric, or its better values are not known.
    """

    #: The folder of the best values, beside the checkpoints of the run.
    _folder: ClassVar[str]

    def __init__(self, metric: str, mode: str, min_delta: float) -> None:
        owner = type(self).__name__
        check_one_of(f"{owner}.mode", mode, ("auto", "min", "max"))
        if not min_delta >= 0:
            raise ConfigError(f"{owner}.min_delta={min_delta}: must be at least 0")
        #: Begins the messages of errors.
        self._key = f"{owner}.metric={metric}"
        self._metric = metric
        self._mode = mode
        self._min_delta = min_delta
        self._is_progressive = metric.startswith(PREFIX)
        self.needs_validation = not self._is_progressive
        self.best: float | None = None

    @abc.abstractmethod
    def judge(self, session: Session, logs: Mapping[str, Any]) -> None:
        """Called with new values, including the metric."""

    def begin(self, session: Session) -> None:
        self.best = None
        if self._is_progressive and not any(isinstance(hook, ProgressiveValidation) for hook in session.hooks):
            raise ConfigError(f"{self._key}: nothing reports it; add the hook ProgressiveValidation")

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        if not self._is_progressive:
            self.judge(session, logs)

    def after_progressive_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        if self._is_progressive:
            self.judge(session, logs)

    def value(self, logs: Mapping[str, Any]) -> float:
        """The metric's value in the logs of a validation."""
        name = self._metric.removeprefix("val_")
        if name not in logs:
            what = "progressive validation" if self._is_progressive else "validation"
            raise ConfigError(f"{self._key}: {what} reports {', '.join(logs)}")
        if hasattr(value := logs[name], "__len__"):
            raise ConfigError(f"{self._key}: has {len(value)} values; choose a metric with one")
        return value

    def is_better(self, session: Session, logs: Mapping[str, Any]) -> bool:
        """True if the value improves the best one by more than `min_delta`; then it becomes the best one."""
        value = self.value(logs)
        name = self._metric.removeprefix("val_").removeprefix(PREFIX)
        mode = mode_of(session.spec.model, name) if self._mode == "auto" else self._mode
        if mode is None:
            raise ConfigError(f"{self._key}: say which values are better: mode=min or mode=max")
        sign = 1 if mode == "max" else -1
        is_gain = self.best is None or sign * (value - self.best) > self._min_delta
        if math.isnan(value) or not is_gain:
            return False
        self.best = value
        return True

    def _kept(self, session: Session) -> Checkpoints:
        return session.checkpoints.beside(self._folder)

    def _keep(self, session: Session) -> tuple[int, Path]:
        """Saves the present values in the place of earlier ones; returns their step and their checkpoint."""
        # In the middle of asynchronous training there may be more steps than the hooks have seen.
        step, kept = session.strategy.values.global_step(), self._kept(session)
        path = kept.write(step, session.strategy.values)
        kept.keep_only(step)
        return step, path


class EarlyStopping(MonitoringHook):
    """Stops when a validation metric has not improved for some validations, as `keras.callbacks.EarlyStopping`.

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

    _folder = EARLY_STOPPING

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 0,
        min_delta: float = 0.0,
        mode: str = "auto",
        restore_best: bool = False,
    ) -> None:
        check_whole_number("EarlyStopping.patience", patience, at_least=0)
        super().__init__(metric, mode, min_delta)
        self._patience = patience
        self._restore_best = restore_best

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._waited = 0
        self._best_validation: tuple[int, Mapping[str, Any]] | None = None

    def judge(self, session: Session, logs: Mapping[str, Any]) -> None:
        if self.is_better(session, logs):
            self._waited = 0
            if self._restore_best:
                self._best_validation = self._keep(session)[0], dict(logs)
            return
        self._waited += 1
        if self._waited >= self._patience:
            session.request_stop("EarlyStopping")

    def end(self, session: Session) -> None:
        # An interrupted run continues later, from where it is.
        if self._best_validation is None or session.interrupted:
            return
        step, logs = self._best_validation
        if step != session.global_step:
            session.restore_values(self._kept(session))
            session.print_line(lines.best_line(session.global_step, session.last_step, step))
            if not self._is_progressive:
                session.publish_validation(logs)


class BestCheckpoint(MonitoringHook):
    """Saves a checkpoint to `best/` in the run dir whenever a validation metric is the best so far.

    A failed save costs a warning. A resumed run knows the best value of earlier runs. As Estimator's `BestExporter`.

    Args:
        metric: `loss`, or the name of a metric; a leading `val_` is ignored. For `progressive_auc`, only windows of
            `ProgressiveValidation` with new examples count as validations.
        mode: `min`, `max`, or `auto` to ask the metric.

    Raises:
        ConfigError: a value is out of range, or nothing validates; from `after_validation`: no such metric.
    """

    _folder = BEST

    def __init__(self, metric: str = "loss", mode: str = "auto") -> None:
        super().__init__(metric, mode, 0.0)

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._has_begun = False

    def after_create_session(self, session: Session) -> None:
        record = session.run_dir / self._folder / _RECORD
        # After a failure of the cluster, the files are those of this run, even if training starts over.
        if not self._has_begun and record.exists():
            if session.global_step:
                self.best = self.value(json.loads(record.read_text(encoding="utf-8"))["validation"])
            else:
                # It belongs to another run in this folder.
                self._kept(session).set_aside()
        self._has_begun = True

    def judge(self, session: Session, logs: Mapping[str, Any]) -> None:
        best_before = self.best
        if not self.is_better(session, logs):
            return
        try:
            step, path = self._keep(session)
            record = {"global_step": step, "validation": dict(logs)}
            write_whole(session.run_dir / self._folder / _RECORD, json.dumps(record, indent=2) + "\n")
            session.print_line(lines.save_line(step, session.last_step, path))
        except (CheckpointError, OSError) as error:
            self.best = best_before
            warn("BestCheckpoint: " + str(error).replace("\n  ", "; ") + "; training continues")
