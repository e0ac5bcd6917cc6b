"""`BestCheckpoint`: keeps the values that validated best."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kdist import console
from kdist.errors import CheckpointError
from kdist.folders import write_whole
from kdist.hooks.base import Hook
from kdist.hooks.monitor import Monitor
from kdist.run_lock import check_not_taken_over
from kdist.warn import warn

if TYPE_CHECKING:
    from kdist.checkpoint import Checkpoints
    from kdist.session import TrainSession

_FOLDER, _RECORD = "best", "validation.json"


class BestCheckpoint(Hook):
    """Saves a checkpoint to `best/` in the run dir whenever a validation metric is the best so far.

    One that cannot be written costs a warning. A run that is resumed knows the best value of the runs before it. After
    Estimator's `BestExporter`.

    Args:
        metric: `loss`, or the name of a metric; `val_` before it is left out.
        mode: `min`, `max`, or `auto` for what the metric says of itself.

    Raises:
        ConfigError: a value out of range, or a fit without validation data; from `after_validation`: no such metric.
    """

    needs_validation = True

    def __init__(self, metric: str = "loss", mode: str = "auto") -> None:
        self._arguments = (metric, mode, 0.0, "BestCheckpoint")
        self._monitor = Monitor(*self._arguments)
        self._has_begun = False

    def begin(self, session: TrainSession) -> None:
        self._monitor = Monitor(*self._arguments)
        self._has_begun = False

    def after_create_session(self, session: TrainSession) -> None:
        # After a cluster failed, what is there is of this run, also if training is back at its beginning.
        if not self._has_begun:
            self._has_begun = True
            self._look_at_earlier_runs(session)

    def after_validation(self, session: TrainSession, logs: Mapping[str, float]) -> None:
        best_before = self._monitor.best
        if not self._monitor.is_better(session, logs):
            return
        try:
            self._save(session, logs)
        except (CheckpointError, OSError) as error:
            self._monitor.best = best_before
            what = str(error).replace("\n  ", "; ")
            warn(f"BestCheckpoint: {what}; training goes on")

    def _look_at_earlier_runs(self, session: TrainSession) -> None:
        record = session.run_dir / _FOLDER / _RECORD
        if not record.exists():
            return
        if session.global_step:
            known = json.loads(record.read_text())
            self._monitor.best = self._monitor.value(known["validation"])
        else:
            # It is of another run that was in this folder.
            _best(session).set_aside()

    def _save(self, session: TrainSession, logs: Mapping[str, float]) -> None:
        step, checkpoints = session.global_step, _best(session)
        check_not_taken_over(session.run_dir)
        path = checkpoints.save(step, session.values())
        checkpoints.keep_only(step)
        record = {"global_step": step, "validation": dict(logs)}
        write_whole(session.run_dir / _FOLDER / _RECORD, json.dumps(record, indent=2) + "\n")
        session.print_line(console.save_line(step, session.last_step, path))

    def idle_in(self, step: int) -> int | None:
        return None


def _best(session: TrainSession) -> Checkpoints:
    # Not above: configs are checked before TensorFlow is imported.
    from kdist.checkpoint import Checkpoints

    return Checkpoints(session.run_dir / _FOLDER)
