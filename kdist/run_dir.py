"""`RunDir`: the folder of everything that one run leaves behind."""

from __future__ import annotations

import os
import warnings
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kdist.checkpoint import Checkpoints
from kdist.parameters.picture import draw_plan
from kdist.summaries import Summaries

if TYPE_CHECKING:
    import keras

    from kdist.parameters.placement import Plan
    from kdist.result import Result


class RunDir:
    """Names what is in a run dir, and writes what is written once. Every write is complete or absent.

    Args:
        path: the folder; None makes a new `runs/<name>/<date_time>`.
        name: what the run is called.
    """

    def __init__(self, path: str | Path | None, name: str) -> None:
        self.path = Path(path) if path is not None else _make_new(Path("runs") / name)
        self.logs = self.path / "logs"
        self.chief_log = self.logs / "chief-0.log"

    def __str__(self) -> str:
        return str(self.path)

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def summaries(self) -> Summaries:
        return Summaries(self.path / "tb")

    @property
    def tensorboard_logdir(self) -> str:
        """The folder that shows this run beside its neighbours."""
        return str(self.path) if self.path.is_absolute() else self.path.parts[0]

    def write_plan(self, plan: Plan) -> None:
        """Writes `placement.txt` and `placement.png`."""
        (self.path / "placement.txt").write_text(plan.table())
        draw_plan(plan, self.path / "placement.png")

    def write_model(self, model: keras.Model) -> None:
        """Writes `model.keras`; warns if the model cannot be written in that form."""
        unfinished = self.path / ".unfinished.keras"
        try:
            model.save(unfinished)
            os.replace(unfinished, self.path / "model.keras")
        except (NotImplementedError, TypeError, ValueError, OSError) as error:
            # A model without get_config trains as well as any other; its weights are in the checkpoint.
            unfinished.unlink(missing_ok=True)
            warnings.warn(
                f"kdist: model.keras could not be written ({error}); the weights are in {self.path / 'checkpoints'}",
                stacklevel=2,
            )

    def write_result(self, result: Result) -> None:
        """Writes `result.json`."""
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = self.path / ".result.json"
        unfinished.write_text(result.to_json())
        os.replace(unfinished, self.path / "result.json")


def _make_new(parent: Path) -> Path:
    """`<parent>/<date_time>`, made here so that two runs of one second differ."""
    base = parent / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    path = base
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = base.with_name(f"{base.name}_{number}")
