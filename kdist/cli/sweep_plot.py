"""`sweep.png`: the objective of the trials over each key that was swept, and how speed and staleness grow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.cli.sweep import is_number, staleness_of, workers_of
from kdist.run.files import written_whole

if TYPE_CHECKING:
    from kdist.cli.sweep import Sweep, Trial

_PANEL_INCHES = (4.6, 3.6)
_COLUMNS = 3
#: The axis is logarithmic from this ratio of the largest to the smallest value.
_LOG_RATIO = 10.0


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draws the finished trials; nothing if there are none.

    Args:
        path: of the PNG file.
    """
    trials = [trial for trial in sweep.trials if sweep.objective_of(trial) is not None]
    if not trials:
        return
    panels = [("objective", key) for key in sweep.swept]
    if {"cluster", "strategy"} & set(sweep.swept):
        panels.append(("speed", ""))
        if any(staleness_of(trial) for trial in trials):
            panels.append(("staleness", ""))
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for (kind, key), panel in zip(panels, axes):
        if kind == "objective":
            _draw_objective(sweep, trials, key, panel)
        elif kind == "speed":
            _draw_by_workers(trials, {trial.number: _speed(trial) for trial in trials}, panel, "examples/s")
        else:
            _draw_by_workers(trials, {trial.number: staleness_of(trial) for trial in trials}, panel, "staleness, mean")
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.suptitle(f"{sweep.folder.name}: {len(trials)} of {len(sweep.trials)} trials done")
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, format="png")


def _draw_objective(sweep: Sweep, trials: list[Trial], key: str, axes: Axes) -> None:
    """A point per trial, and a line through the best of each value."""
    values = [value for value in sweep.values_of(key) if any(trial.overrides.get(key) == value for trial in trials)]
    are_numbers = bool(values) and all(map(is_number, values))
    places = {value: float(value) if are_numbers else float(i) for i, value in enumerate(values)}
    objectives = {trial.number: found for trial in trials if (found := sweep.objective_of(trial)) is not None}
    best: dict[str, float] = {}
    for trial in trials:
        if key not in trial.overrides:
            continue
        found, value = objectives[trial.number], trial.overrides[key]
        axes.plot(places[value], found.value, "o", color="tab:blue", alpha=0.6)
        better = max if found.mode == "max" else min
        best[value] = better(best.get(value, found.value), found.value)
    axes.plot([places[value] for value in values], [best[value] for value in values], color="tab:orange", label="best")
    if are_numbers:
        if min(places.values()) > 0 and max(places.values()) / min(places.values()) >= _LOG_RATIO:
            axes.set_xscale("log")
    else:
        axes.set_xticks(list(places.values()), values)
    axes.set_xlabel(key)
    axes.set_ylabel(sweep.metric)
    axes.legend()


def _draw_by_workers(trials: list[Trial], values: dict[int, float | None], axes: Axes, what: str) -> None:
    """A line per strategy, over the number of workers."""
    for strategy in dict.fromkeys(_strategy(trial) for trial in trials):
        points: dict[int, list[float]] = {}
        for trial in trials:
            workers, value = workers_of(trial), values[trial.number]
            if _strategy(trial) == strategy and workers is not None and value is not None:
                points.setdefault(workers, []).append(value)
        middle = [sorted(points[workers])[len(points[workers]) // 2] for workers in sorted(points)]
        axes.plot(sorted(points), middle, "o-", label=strategy)
    axes.set_xticks(sorted({workers for trial in trials if (workers := workers_of(trial)) is not None}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    axes.set_ylabel(what)
    axes.legend()


def _speed(trial: Trial) -> float | None:
    return (trial.result or {}).get("examples_per_second")


def _strategy(trial: Trial) -> str:
    return str((trial.result or {}).get("strategy"))
