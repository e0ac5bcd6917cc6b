"""Sweeps: which trials in a sweep's folder are done, their results, and how they compare.

A sweep is one folder with one numbered folder per trial. There, `trial.json` records the overrides of the trial and how
it ended, beside the `result.json` of its run. A sweep that is run again needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.errors import ConfigError, KdistError
from kdist.run.files import make_private, relative, write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig

_RECORD = "trial.json"
#: Objectives besides validation metrics: keys of `result.json`, and which of their values are better.
_OF_RESULT = {"steps_per_second": "max", "examples_per_second": "max", "seconds": "min"}
#: Overrides that do not affect what is trained.
_NOT_OF_TRAINING = ("run.", "hydra.", "sweep.")


@dataclass(frozen=True)
class Trial:
    """One trial of a sweep.

    Attributes:
        folder: its run dir; the name is the trial's number.
        overrides: its own overrides: values by keys.
        status: `running` (or killed), `done`, `failed` or `preempted`.
        error: the message of its error.
        exit_code: the exit code that a single run would have had.
        result: its `result.json`; empty if it has none.
    """

    folder: Path
    overrides: Mapping[str, str]
    status: str = "running"
    error: str | None = None
    exit_code: int = 0
    result: Mapping[str, Any] | None = None

    @property
    def number(self) -> int:
        return int(self.folder.name)

    def write(self) -> None:
        make_private(self.folder)
        record = {name: getattr(self, name) for name in ("overrides", "status", "error", "exit_code")}
        write_whole(self.folder / _RECORD, json.dumps(record, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Trial | None:
        """The trial of a folder; None if there is none."""
        try:
            record = json.loads((folder / _RECORD).read_text())
        except (OSError, ValueError):
            return None
        try:
            result = json.loads((folder / "result.json").read_text())
        except (OSError, ValueError):
            result = None
        return cls(folder, **record, result=result)


@dataclass(frozen=True)
class Objective:
    """The objective of a trial.

    Attributes:
        name: as in the config, without `val_`.
        value: its value.
        mode: `min` or `max`: which values are better.
    """

    name: str
    value: float
    mode: str


class SweepFailedError(KdistError):
    """Some trials of a sweep failed; their errors were printed."""

    def __init__(self, trials: Sequence[Trial], num_all: int) -> None:
        numbers = ", ".join(str(trial.number) for trial in trials)
        super().__init__(f"{len(trials)} of {num_all} trials failed: {numbers}")
        self.exit_code = trials[0].exit_code


def begin_trial(folder: Path, overrides: Sequence[str]) -> Trial:
    """The trial to run in a folder, or the finished one that is there.

    Args:
        overrides: `key=value`, all overrides of the trial.

    Raises:
        ConfigError: the folder holds another trial.
    """
    own = dict(_split(override) for override in overrides)
    own = {key: value for key, value in own.items() if not key.startswith(_NOT_OF_TRAINING)}
    trial = Trial.read(folder)
    if trial is not None and trial.overrides != own:
        held, wanted = (" ".join(f"{k}={v}" for k, v in o.items()) or "no overrides" for o in (trial.overrides, own))
        raise ConfigError(f"{folder}: holds a trial with {held}, not {wanted}; give another sweep a folder of its own")
    if trial is None or trial.status != "done" or (trial.result or {}).get("status") != "done":
        trial = Trial(folder, own)
        trial.write()
    return trial


def objective(result: Mapping[str, Any], metric: str | None, mode: str | None) -> Objective | None:
    """The objective of a run: the best value of a validation metric.

    Args:
        result: the content of `result.json`.
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


class TrialRunner:
    """Hydra calls this for each trial of a sweep, in this process or in one that a launcher started.

    Args:
        run: runs a trial with its config, in the run dir that Hydra has created for it.
        print_error: prints the error of a trial.
    """

    def __init__(self, run: Callable[[DictConfig], None], print_error: Callable[[Exception], None]) -> None:
        self._run_job = run
        self._print_error = print_error
        #: An error that affects the whole sweep, so that it is not repeated after every trial.
        self._stopped_by: ConfigError | None = None

    def __call__(self, config: DictConfig) -> float | None:
        """Runs the trial unless it is done, and returns its objective; None if it failed.

        Raises:
            ConfigError: the folder belongs to another trial, or the sweep's metric is wrong.
        """
        from hydra.core.hydra_config import HydraConfig

        from kdist.cli.hydra_plugins import overrides_of_job

        if self._stopped_by is not None:
            raise self._stopped_by
        hydra = HydraConfig.get()
        overrides = overrides_of_job()
        print(f"\ntrial {hydra.job.num} | {' '.join(overrides)}", flush=True)
        trial = begin_trial(relative(Path(hydra.runtime.output_dir)), overrides)
        if trial.status == "done":
            print("already done; skipped", flush=True)
        else:
            self._run(trial, config)
            trial = Trial.read(trial.folder) or trial
        if trial.status != "done" or trial.result is None:
            return None
        try:
            found = objective(trial.result, config.sweep.metric, config.sweep.mode)
            direction = hydra.sweeper.get("direction")
            if found is not None and direction in ("minimize", "maximize") and direction[:3] != found.mode:
                raise ConfigError(
                    f"hydra.sweeper.direction={direction}: of {found.name}, larger values are "
                    f"{'better' if found.mode == 'max' else 'worse'}; use {found.mode}imize"
                )
        except ConfigError as error:
            self._stopped_by = error
            raise
        return None if found is None else found.value

    def _run(self, trial: Trial, config: DictConfig) -> None:
        try:
            self._run_job(config)
        except (KeyboardInterrupt, SystemExit):
            replace(trial, status="preempted").write()
            raise
        except Exception as error:  # noqa: BLE001 - Hydra would end the sweep
            self._print_error(error)
            code = error.exit_code if isinstance(error, KdistError) else 1
            replace(trial, status="failed", error=str(error) or type(error).__name__, exit_code=code).write()
        else:
            replace(trial, status="done").write()


class Sweep:
    """The trials of a sweep's folder.

    Args:
        folder: of the sweep.
        metric, mode: see `objective`.
    """

    def __init__(self, folder: Path, metric: str | None = None, mode: str | None = None) -> None:
        self.folder = folder
        found = [Trial.read(path) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        self.trials = sorted((trial for trial in found if trial is not None), key=lambda trial: trial.number)
        self._objectives = {
            trial.number: objective(trial.result, metric, mode)
            for trial in self.trials
            if trial.status == "done" and trial.result
        }

    @property
    def failed(self) -> list[Trial]:
        """The trials that failed, in their order."""
        return [trial for trial in self.trials if trial.status == "failed"]

    @property
    def swept(self) -> list[str]:
        """The keys in which trials differ; all of a sweep of one trial."""
        keys = list(dict.fromkeys(key for trial in self.trials for key in trial.overrides))
        return [
            key for key in keys if len(self.trials) == 1 or len({trial.overrides.get(key) for trial in self.trials}) > 1
        ]

    def values_of(self, key: str) -> list[str]:
        """The values of a key in the trials: numbers sorted, others in order of appearance."""
        values = list(dict.fromkeys(trial.overrides[key] for trial in self.trials if key in trial.overrides))
        return sorted(values, key=float) if values and all(map(is_number, values)) else values

    def objective_of(self, trial: Trial) -> Objective | None:
        """The objective of a trial; None if it is not done."""
        return self._objectives.get(trial.number)

    @property
    def metric(self) -> str:
        """The metric by which trials are compared."""
        return next((found.name for found in self._objectives.values() if found is not None), "objective")

    @property
    def is_done(self) -> bool:
        """Whether every trial that was started is done."""
        return all(trial.status == "done" for trial in self.trials)

    def best_first(self) -> list[Trial]:
        """The trials, unfinished ones last."""

        def place(trial: Trial) -> tuple[bool, float]:
            found = self.objective_of(trial)
            return (True, 0.0) if found is None else (False, -found.value if found.mode == "max" else found.value)

        return sorted(self.trials, key=place)

    def table(self) -> list[str]:
        """One line per trial, best first; then the failed ones with their errors."""
        heads = ["trial", *self.swept, self.metric, "steps/s", "staleness", "status"]
        rows = [self._row(trial) for trial in self.best_first()]
        widths = [max(map(len, column)) for column in zip(heads, *rows)]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
        lines.insert(1, "-+-".join("-" * width for width in widths))
        for trial in self.failed:
            lines.append(
                f"trial {trial.number} failed: {(trial.error or '').splitlines()[0] if trial.error else 'unknown'}"
            )
        return lines

    def _row(self, trial: Trial) -> list[str]:
        found, result = self.objective_of(trial), trial.result or {}
        return [
            str(trial.number),
            *(trial.overrides.get(key, "") for key in self.swept),
            "" if found is None else f"{found.value:.4g}",
            _number(result.get("steps_per_second"), "{:.1f}"),
            _number(staleness_of(trial), "{:.2f}"),
            # The sweep has ended, so a trial that is still marked as running was killed.
            "not done" if trial.status == "running" else trial.status,
        ]

    def write(self) -> None:
        """Writes the table to `sweep.txt`."""
        write_whole(self.folder / "sweep.txt", "\n".join(self.table()) + "\n")


def staleness_of(trial: Trial) -> float | None:
    """The mean staleness of the gradients of a trial."""
    return (trial.result or {}).get("gradients", {}).get("staleness_mean")


def workers_of(trial: Trial) -> int | None:
    """The number of workers of a trial."""
    return (trial.result or {}).get("workers")


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value
