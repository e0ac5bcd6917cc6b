"""Sweeps: which trials in a sweep's folder are done, their results, and how they compare, as a table and a picture.

A sweep is one folder with one numbered folder per trial. There, `trial.json` records the overrides of the trial and how
it ended, beside the `result.json` of its run. A sweep that is run again needs nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.errors import ConfigError, KdistError
from kdist.run.files import make_private, relative, write_whole, written_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig

_RECORD = "trial.json"
#: Objectives besides validation metrics: keys of `result.json`, and which of their values are better.
_OF_RESULT = {"steps_per_second": "max", "examples_per_second": "max", "seconds": "min"}
#: Overrides that do not affect what is trained.
_NOT_OF_TRAINING = ("run.", "hydra.", "sweep.")

_PANEL_INCHES = (4.6, 3.6)
_COLUMNS = 3
#: The axis is logarithmic from this ratio of the largest to the smallest value.
_LOG_RATIO = 10.0


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
    result: Mapping[str, Any] = field(default_factory=dict)

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
            result = {}
        return cls(folder, **record, result=result)


@dataclass(frozen=True)
class Objective:
    """The value of metric `name` (without `val_`) by which trials are compared; whether `min` or `max` is better."""

    name: str
    value: float
    mode: str


def begin_trial(folder: Path, overrides: Sequence[str]) -> Trial:
    """The trial with these overrides (`key=value`) to run in a folder, or the finished one that is there.

    Raises:
        ConfigError: the folder holds another trial.
    """
    parts = (override.lstrip("+~").partition("=") for override in overrides)
    own = {key: value for key, _, value in parts if not key.startswith(_NOT_OF_TRAINING)}
    trial = Trial.read(folder)
    if trial is not None and trial.overrides != own:
        held, wanted = (" ".join(f"{k}={v}" for k, v in o.items()) or "no overrides" for o in (trial.overrides, own))
        raise ConfigError(f"{folder}: holds a trial with {held}, not {wanted}; give another sweep a folder of its own")
    if trial is None or trial.status != "done" or trial.result.get("status") != "done":
        trial = Trial(folder, own)
        trial.write()
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


class TrialRunner:
    """Hydra calls this for each trial of a sweep, in this process or in one that a launcher started."""

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
        if trial.status != "done" or not trial.result:
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
    """The trials of a sweep's folder, compared by `metric` and `mode` as in `objective`.

    Attributes:
        trials: by number.
        failed: those that failed.
        swept: the keys in which trials differ; all of a sweep of one trial.
        objectives: of the trials that are done, by number.
        metric: the name by which trials are compared.
    """

    def __init__(self, folder: Path, metric: str | None = None, mode: str | None = None) -> None:
        self.folder = folder
        read = [Trial.read(path) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        self.trials = sorted((trial for trial in read if trial is not None), key=lambda trial: trial.number)
        self.failed = [trial for trial in self.trials if trial.status == "failed"]
        keys = dict.fromkeys(key for trial in self.trials for key in trial.overrides)
        values = {key: {trial.overrides.get(key) for trial in self.trials} for key in keys}
        self.swept = [key for key in keys if len(self.trials) == 1 or len(values[key]) > 1]
        self.objectives = {
            trial.number: found
            for trial in self.trials
            if trial.status == "done" and trial.result and (found := objective(trial.result, metric, mode))
        }
        self.metric = next((found.name for found in self.objectives.values()), "objective")

    def best_first(self) -> list[Trial]:
        """The trials, unfinished ones last."""

        def place(trial: Trial) -> tuple[bool, float]:
            found = self.objectives.get(trial.number)
            return (True, 0.0) if found is None else (False, -found.value if found.mode == "max" else found.value)

        return sorted(self.trials, key=place)

    def table(self) -> list[str]:
        """One line per trial, best first; then the failed ones with their errors."""
        heads = ["trial", *self.swept, self.metric, "steps/s", "staleness", "status"]
        rows = [
            [
                str(trial.number),
                *(trial.overrides.get(key, "") for key in self.swept),
                _number(found.value if (found := self.objectives.get(trial.number)) else None, ".4g"),
                _number(trial.result.get("steps_per_second"), ".1f"),
                _number(staleness_of(trial), ".2f"),
                # The sweep has ended, so a trial that is still marked as running was killed.
                "not done" if trial.status == "running" else trial.status,
            ]
            for trial in self.best_first()
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows)]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
        lines.insert(1, "-+-".join("-" * width for width in widths))
        errors = {trial.number: trial.error.splitlines()[0] if trial.error else "unknown" for trial in self.failed}
        return lines + [f"trial {number} failed: {error}" for number, error in errors.items()]

    def write(self) -> None:
        """Writes the table to `sweep.txt`."""
        write_whole(self.folder / "sweep.txt", "\n".join(self.table()) + "\n")


def staleness_of(trial: Trial) -> float | None:
    return trial.result.get("gradients", {}).get("staleness_mean")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draws the finished trials as a PNG: the objective over each swept key, speed, staleness; nothing without any."""
    trials = [trial for trial in sweep.trials if trial.number in sweep.objectives]
    if not trials:
        return
    panels = [partial(_draw_objective, sweep, trials, key) for key in sweep.swept]
    if {"cluster", "strategy"} & set(sweep.swept):
        panels.append(partial(_draw_by_workers, trials, lambda t: t.result.get("examples_per_second"), "examples/s"))
        if any(staleness_of(trial) for trial in trials):
            panels.append(partial(_draw_by_workers, trials, staleness_of, "staleness, mean"))
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for draw, panel in zip(panels, axes):
        draw(panel)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.suptitle(f"{sweep.folder.name}: {len(trials)} of {len(sweep.trials)} trials done")
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, format="png")


def _draw_objective(sweep: Sweep, trials: list[Trial], key: str, axes: Axes) -> None:
    """A point per trial, and a line through the best of each value."""
    points: dict[str, list[float]] = {}
    for trial in trials:
        if key in trial.overrides:
            points.setdefault(trial.overrides[key], []).append(sweep.objectives[trial.number].value)
    try:
        places = {value: float(value) for value in points}
    except ValueError:
        places = {value: float(index) for index, value in enumerate(points)}
        axes.set_xticks(list(places.values()), list(places))
    else:
        if places and min(places.values()) > 0 and max(places.values()) / min(places.values()) >= _LOG_RATIO:
            axes.set_xscale("log")
    values = sorted(points, key=lambda value: places[value])
    for value in values:
        axes.plot([places[value]] * len(points[value]), points[value], "o", color="tab:blue", alpha=0.6)
    best = max if sweep.objectives[trials[0].number].mode == "max" else min
    axes.plot([places[v] for v in values], [best(points[v]) for v in values], color="tab:orange", label="best")
    axes.set_xlabel(key)
    axes.set_ylabel(sweep.metric)
    axes.legend()


def _draw_by_workers(trials: list[Trial], value_of: Callable[[Trial], float | None], what: str, axes: Axes) -> None:
    """A line per strategy, over the number of workers."""
    lines: dict[str, dict[int, list[float]]] = {}
    for trial in trials:
        points = lines.setdefault(str(trial.result.get("strategy")), {})
        workers, value = trial.result.get("workers"), value_of(trial)
        if workers is not None and value is not None:
            points.setdefault(workers, []).append(value)
    for strategy, points in lines.items():
        middle = [sorted(points[workers])[len(points[workers]) // 2] for workers in sorted(points)]
        axes.plot(sorted(points), middle, "o-", label=strategy)
    axes.set_xticks(sorted({trial.result["workers"] for trial in trials if trial.result.get("workers") is not None}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    axes.set_ylabel(what)
    axes.legend()
