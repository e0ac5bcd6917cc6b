"""`WandbTracker`: the run in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdist.config.checks import check_one_of
from kdist.hooks.tracker import Tracker
from kdist.run.result import Result, final_metrics


class WandbTracker(Tracker):
    """Sends config, metrics by global step, system metrics and the result to Weights & Biases.

    If the program has a run (`wandb.init()`), that is used, and the program finishes it. The trials of a sweep are a
    group.

    Args:
        project: its name; None is that of W&B, from WANDB_PROJECT.
        entity: the user or team; None is the default of the account.
        mode: `online`, `offline` (`wandb sync` sends it later) or `disabled`; None is that of W&B, from WANDB_MODE.
        save_model: whether `model.keras` becomes an artifact.
        timeout: seconds that W&B has at the end of the run.

    Raises:
        ConfigError: W&B is not installed, the mode is unknown, or `timeout` is out of range.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Any = None,
        save_model: bool = False,
        timeout: float = 30.0,
    ) -> None:
        super().__init__("wandb", "wandb", save_model, timeout)
        check_one_of("WandbTracker.mode", mode, (None, "online", "offline", "disabled"))
        self._project = project
        self._entity = entity
        self._mode = mode

    def _start(self, earlier: Mapping[str, Any], result: Result) -> Mapping[str, Any]:
        import wandb

        self._is_ours = wandb.run is None
        self._had_service = "WANDB_SERVICE" in os.environ
        if self._is_ours:
            folder = self._sweep_folder
            self._run: Any = wandb.init(
                project=self._project,
                entity=self._entity,
                mode=self._mode,
                id=earlier.get("id"),
                resume="allow",
                name=self._name,
                group=None if folder is None else folder.name,
                dir=self._run_dir,
                # The console has what kdist prints.
                settings=wandb.Settings(console="off", silent=True),
            )
        else:
            self._run = wandb.run
        self._run.config.update(
            {
                **result.config,
                "resolved": {"strategy": result.strategy, "cluster": result.cluster, "seed": result.seed},
            },
            allow_val_change=True,
        )
        # A step may have several lines, and a run that resumes goes back to its last checkpoint.
        self._run.define_metric("*", step_metric="global_step")
        return {"id": self._run.id}

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "global_step": step})

    def _finish(self, result: Result, files: list[Path]) -> None:
        import wandb

        self._run.summary.update({**final_metrics(result), "status": result.status, "global_step": result.global_step})
        artifact = wandb.Artifact(f"run-{self._run.id}", "run")
        for file in files:
            artifact.add_file(str(file))
        self._run.log_artifact(artifact)
        if self._is_ours:
            self._run.finish(0 if result.status == "done" else 1)
        if not self._had_service:
            # It ends the service of W&B, and forgets where that is.
            wandb.teardown()
