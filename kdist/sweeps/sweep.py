"""Sweeps: the trials in a sweep's folder, run unless they are done, and compared as a table.

A sweep is one folder with one folder per trial, named by `hydra.sweep.subdir`. There, `trial.json` records the
overrides of the trial and how it ended, beside the `result.json` of its run. A sweep that is run again needs nothing
else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist import log
from kdist.config.hparams import by_key, is_of_training, overrides_of_job
from kdist.errors import ConfigError, KdistError
from kdist.run.result import content_of
from kdist.storage.files import OWNER_ONLY
from kdist.storage.folder import Folder
from kdist.storage.lock import RunLock
from kdist.sweeps.groups import HEADS, OBJECTIVE, Group, cells, group_by, sort_by, table
from kdist.sweeps.load import RESULT, SEED, TRIAL, Row, runs_in

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Objectives besides validation metrics: keys of `result.json`, and which of their values are better.
_OF_RESULT = {"steps_per_second": "max", "examples_per_second": "max", "seconds": "min"}


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep, with its own overrides and its `result.json`, which is empty if it has none.

    Attributes:
        name: the name of its run dir in the sweep's folder, which may have slashes.
        status: `running` (or killed), `done`, `failed` or `preempted`.
        exit_code: the exit code that a single run would have had.
        job: its number in the sweep that ran it last; None if only its name says it.
    """

    name: str
    overrides: Mapping[str, str]
    status: str = "running"
    error: str | None = None
    exit_code: int = 0
    job: int | None = None
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return int(self.name) if self.job is None else self.job

    def __str__(self) -> str:
        return self.name if self.name == str(self.number) else f"{self.number} ({self.name})"

    def write(self, sweep: Folder) -> None:
        record = {name: getattr(self, name) for name in ("overrides", "status", "error", "exit_code", "job")}
        sweep.write(f"{self.name}/{TRIAL}", (json.dumps(record, indent=2) + "\n").encode())

    @classmethod
    def read(cls, sweep: Folder, name: str) -> Trial | None:
        """The trial of that name; None if there is none."""
        record = content_of(sweep.read(f"{name}/{TRIAL}") or b"")
        if "overrides" not in record:
            return None
        return cls(name, **record, result=content_of(sweep.read(f"{name}/{RESULT}") or b""))


@dataclass(frozen=True)
class Objective:
    """The value of metric `name` (without `val_`) by which trials are compared; `min` or `max` is better."""

    name: str
    value: float
    mode: str


def begin_trial(sweep: Folder, name: str, overrides: Sequence[str], job: int | None = None) -> Trial:
    """The trial with these overrides (`key=value`) to run under this name, or the finished one that is there.

    Raises:
        ConfigError: another trial has this name, or a process trains in it, or it is not a folder in the sweep's.
    """
    if name == "." or name.startswith(".."):
        raise ConfigError(
            f"hydra.sweep.subdir: {sweep}/{name} is not a folder in hydra.sweep.dir; "
            "take ${hydra:job.num} or ${hydra:job.override_dirname}"
        )
    RunLock(sweep / name).check()
    own = {key: text for key, text in by_key(overrides).items() if is_of_training(key)}
    trial = Trial.read(sweep, name)
    if trial is not None and trial.overrides != own:
        held, wanted = (" ".join(f"{k}={v}" for k, v in o.items()) or "no overrides" for o in (trial.overrides, own))
        raise ConfigError(
            f"{sweep}/{name}: holds a trial with {held}, not {wanted}; give another sweep a folder of its own, "
            "and each trial a name of its own, if you have set hydra.sweep.subdir"
        )
    if trial is None or trial.status != "done" or trial.result.get("status") != "done":
        trial = Trial(name, own, job=job)
        trial.write(sweep)
    return trial


def objective(result: Mapping[str, Any], metric: str | None, mode: str | None) -> Objective | None:
    """The objective of a run, from its `result.json`: the best value of a validation metric.

    Args:
        metric: its name, also with `val_` before it; `steps_per_second`, `examples_per_second` or `seconds`; None is
            the validation loss, or without validation the training loss.
        mode: `min` or `max`; None asks the metric.

    Raises:
        ConfigError: there is no such metric, or it is not known which of its values are better.
    """
    best: Mapping[str, Any] = result.get("best") or {}
    if metric is None and not best:
        loss = result["metrics"]["train"].get("loss")
        return None if loss is None else Objective("train loss", loss, "min")
    name = (metric or "loss").removeprefix("val_")
    if name in _OF_RESULT:
        value, better = result.get(name), _OF_RESULT[name]
    elif name in best:
        value, better = best[name]["value"], best[name]["mode"]
    else:
        raise ConfigError(f"sweep.metric={metric}: a run reports {', '.join([*best, *_OF_RESULT])}")
    if (mode or better) is None:
        raise ConfigError(f"sweep.metric={metric}: say which values are better: sweep.mode=min or sweep.mode=max")
    return None if value is None else Objective(name, value, mode or better)


def bring_files(folder: Folder) -> None:
    """Brings the files that Hydra has written into the folder of a sweep to their place."""
    folder.publish([path.name for path in folder.path.glob("*") if path.is_file()])


class TrialRunner:
    """Hydra calls this for each trial of a sweep, in this process or in one that a launcher started.

    `run` gets the config and the run dir of a trial, and `print_error` the reason why one has failed.
    """

    def __init__(
        self, sweep: Folder, run: Callable[[DictConfig, str], None], print_error: Callable[[Exception], None]
    ) -> None:
        self._sweep = sweep
        self._run_job = run
        self._print_error = print_error
        #: An error that affects the whole sweep. Hydra would run the other trials before it raises it.
        self._stopped_by: Exception | None = None

    def __call__(self, config: DictConfig) -> float | None:
        """Runs the trial unless it is done, and returns its objective; None if it failed."""
        if self._stopped_by is not None:
            raise self._stopped_by
        try:
            return self._objective_of_trial(config)
        except Exception as error:
            self._stopped_by = error
            raise

    def _objective_of_trial(self, config: DictConfig) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        overrides = overrides_of_job()
        log.say(log.Line(f"\ntrial {hydra.job.num} | {' '.join(overrides)}", "trial", values={"overrides": overrides}))
        name = os.path.relpath(hydra.runtime.output_dir, hydra.sweep.dir)
        if not any((run_dir := Path(hydra.runtime.output_dir)).iterdir()):
            # Hydra has just created it, for everyone.
            # A share of another system may know no permissions.
            with suppress(PermissionError):
                run_dir.chmod(OWNER_ONLY)
        trial = begin_trial(self._sweep, name, overrides, hydra.job.num)
        if trial.status == "done":
            log.say("already done; skipped")
        else:
            self._run(trial, config)
            trial = Trial.read(self._sweep, name) or trial
        if trial.status != "done" or not trial.result:
            return None
        found = objective(trial.result, config.sweep.metric, config.sweep.mode)
        direction = hydra.sweeper.get("direction")
        if found is not None and direction in ("minimize", "maximize") and direction[:3] != found.mode:
            raise ConfigError(
                f"hydra.sweeper.direction={direction}: of {found.name}, larger values are "
                f"{'better' if found.mode == 'max' else 'worse'}; use {found.mode}imize"
            )
        return None if found is None else found.value

    def _run(self, trial: Trial, config: DictConfig) -> None:
        try:
            self._run_job(config, f"{self._sweep}/{trial.name}")
        except (KeyboardInterrupt, SystemExit):
            replace(trial, status="preempted").write(self._sweep)
            raise
        except Exception as error:  # noqa: BLE001 - Hydra would end the sweep
            self._print_error(error)
            code = error.exit_code if isinstance(error, KdistError) else 1
            replace(trial, status="failed", error=str(error) or type(error).__name__, exit_code=code).write(self._sweep)
        else:
            replace(trial, status="done").write(self._sweep)


class Sweep:
    """The trials of a sweep's folder, by number, compared by `metric` and `mode` as in `objective`.

    Attributes:
        swept: the keys in which trials differ; all of a sweep of one trial.
        rows: the rows of `kdist.load_runs`, in the same order, with their objectives in the column `OBJECTIVE`.
    """

    def __init__(self, folder: Folder, metric: str | None = None, mode: str | None = None) -> None:
        self.folder = folder
        names = [name.removesuffix(f"/{TRIAL}") for name in folder.names() if name.endswith(f"/{TRIAL}")]
        found = (Trial.read(folder, name) for name in names)
        self.trials = sorted(filter(None, found), key=lambda trial: (trial.number, trial.name))
        self.failed = [trial for trial in self.trials if trial.status == "failed"]
        runs = runs_in(folder, [trial.name for trial in self.trials])
        differing = runs.varied() if len(self.trials) > 1 else ["cluster", "strategy", *runs.keys]
        # Which strategy `auto` is may follow from the cluster.
        self.swept = [key for key in differing if any(key in trial.overrides for trial in self.trials)]
        objectives = {
            trial.name: objective(trial.result, metric, mode)
            for trial in self.trials
            if trial.status == "done" and trial.result
        }
        one = next((each for each in objectives.values() if each is not None), Objective(OBJECTIVE, 0.0, "min"))
        self.metric, self.mode = one.name, one.mode
        values = {name: each.value for name, each in objectives.items() if each is not None}
        numbers = {trial.name: trial.number for trial in self.trials}
        self.rows: list[Row] = [
            {**row, "trial": numbers[row["run"]], OBJECTIVE: values.get(row["run"])} for row in runs.rows
        ]
        self._errors = runs.errors

    def groups(self) -> list[Group]:
        """Trials that differ in their seed only, best first, and those without a result last."""
        groups = group_by(self.rows, [key for key in self.swept if key != SEED])
        return sort_by(groups, OBJECTIVE, descending=self.mode == "max")

    def table(self, width: int | None = None) -> list[str]:
        """One line per group, with mean and standard deviation over its seeds; then the errors of failed trials.

        In a terminal of this width it has the columns that fit.
        """
        trials = {trial.name: trial for trial in self.trials}
        keys = sorted(self.swept, key=lambda key: key == SEED)
        groups, heads = self.groups(), {**HEADS, OBJECTIVE: self.metric}
        names = ["status", "trial", "global_step", OBJECTIVE, "steps_per_second", *keys]
        columns = {heads.get(name, name): cells(groups, name) for name in names}
        more = f"sweep.txt has all, and kdist runs {self.folder} takes --columns"
        failed = [f"trial {trials[name]} failed: {error}" for name, error in self._errors.items()]
        return table(columns, width, more) + failed

    def write(self) -> None:
        """Writes the table to `sweep.txt`."""
        self.folder.write("sweep.txt", ("\n".join(self.table()) + "\n").encode())
