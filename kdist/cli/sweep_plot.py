"""The picture of a sweep."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.cli.sweep import Sweep, Trial, staleness_of

_PANEL_INCHES = (4.6, 3.6)
_COLUMNS = 3
#: The axis is logarithmic from this ratio of the largest to the smallest value.
_LOG_RATIO = 10.0


def picture_of(sweep: Sweep) -> bytes | None:
    """The finished trials as a PNG: the objective over each swept key, speed, staleness; None without any."""
    trials = [trial for trial in sweep.trials if trial.number in sweep.objectives]
    if not trials:
        return None
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
    name = str(sweep.folder).rpartition("/")[2]
    figure.suptitle(f"{name}: {len(trials)} of {len(sweep.trials)} trials done")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


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
