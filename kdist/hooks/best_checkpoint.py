"""`BestCheckpoint`: keeps the checkpoint with the best validation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kdist.console import lines
from kdist.errors import CheckpointError
from kdist.hooks.base import Session
from kdist.hooks.early_stopping import MonitoringHook
from kdist.log import warn
from kdist.storage.files import write_whole

_RECORD = "validation.json"


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

    _folder = "best"

    def __init__(self, metric: str = "loss", mode: str = "auto") -> None:
        super().__init__(metric, mode, 0.0)
        self._has_begun = False

    def begin(self, session: Session) -> None:
        super().begin(session)
        self._has_begun = False

    def after_create_session(self, session: Session) -> None:
        record = session.run_dir / self._folder / _RECORD
        # After a failure of the cluster, the files are those of this run, even if training starts over.
        if not self._has_begun and record.exists():
            if session.global_step:
                known = json.loads(record.read_text())
                self.best = self.value(known["validation"])
            else:
                # It belongs to another run in this folder.
                self._kept(session).set_aside()
        self._has_begun = True

    def judge(self, session: Session, logs: Mapping[str, Any]) -> None:
        best_before = self.best
        if not self.is_better(session, logs):
            return
        try:
            self._save(session, logs)
        except (CheckpointError, OSError) as error:
            self.best = best_before
            warn("BestCheckpoint: " + str(error).replace("\n  ", "; ") + "; training continues")

    def _save(self, session: Session, logs: Mapping[str, Any]) -> None:
        step, path = self._keep(session)
        record = {"global_step": step, "validation": dict(logs)}
        write_whole(session.run_dir / self._folder / _RECORD, json.dumps(record, indent=2) + "\n")
        session.print_line(lines.save_line(step, session.last_step, path))
