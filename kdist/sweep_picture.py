"""`sweep.png`: what jobs of a sweep came to, by each key that was swept, and how speed and staleness grow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.sweep import is_number, staleness_of, workers_of

if TYPE_CHECKING:
    from kdist.sweep import Job, Sweep

_PANEL_INCHES = (4.6, 3.6)
_COLUMNS = 3
#: From this ratio of the largest to the smallest value on, the axis is logarithmic.
_LOG_RATIO = 10.0


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draws the jobs that are done; nothing if there is none.

    Args:
        path: of the PNG file.
    """
    jobs = [job for job in sweep.jobs if sweep.objective_of(job) is not None]
    if not jobs:
        return
    panels = [("objective", key) for key in sweep.swept]
    if {"cluster", "strategy"} & set(sweep.swept):
        panels.append(("speed", ""))
        if any(staleness_of(job) for job in jobs):
            panels.append(("staleness", ""))
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for (kind, key), panel in zip(panels, axes):
        if kind == "objective":
            _draw_objective(sweep, jobs, key, panel)
        elif kind == "speed":
            _draw_by_workers(jobs, {job.number: _speed(job) for job in jobs}, panel, "examples/s")
        else:
            _draw_by_workers(jobs, {job.number: staleness_of(job) for job in jobs}, panel, "staleness, mean")
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.suptitle(f"{sweep.folder.name}: {len(jobs)} of {len(sweep.jobs)} jobs done")
    unfinished = path.with_name(f".{path.name}")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)


def _draw_objective(sweep: Sweep, jobs: list[Job], key: str, axes: Axes) -> None:
    """A point a job, and a line through the best of each value."""
    values = [value for value in sweep.values_of(key) if any(job.overrides.get(key) == value for job in jobs)]
    are_numbers = bool(values) and all(map(is_number, values))
    places = {value: float(value) if are_numbers else float(i) for i, value in enumerate(values)}
    objectives = {job.number: found for job in jobs if (found := sweep.objective_of(job)) is not None}
    best: dict[str, float] = {}
    for job in jobs:
        if key not in job.overrides:
            continue
        found, value = objectives[job.number], job.overrides[key]
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


def _draw_by_workers(jobs: list[Job], values: dict[int, float | None], axes: Axes, what: str) -> None:
    """A line for each strategy, over the number of workers."""
    for strategy in dict.fromkeys(_strategy(job) for job in jobs):
        points: dict[int, list[float]] = {}
        for job in jobs:
            workers, value = workers_of(job), values[job.number]
            if _strategy(job) == strategy and workers is not None and value is not None:
                points.setdefault(workers, []).append(value)
        middle = [sorted(points[workers])[len(points[workers]) // 2] for workers in sorted(points)]
        axes.plot(sorted(points), middle, "o-", label=strategy)
    axes.set_xticks(sorted({workers for job in jobs if (workers := workers_of(job)) is not None}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    axes.set_ylabel(what)
    axes.legend()


def _speed(job: Job) -> float | None:
    return (job.result or {}).get("examples_per_second")


def _strategy(job: Job) -> str:
    return str((job.result or {}).get("strategy"))
