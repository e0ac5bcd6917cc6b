"""What came out of the races, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.races import GOALS
from benchmarks.workloads import WORKLOADS

Results = Mapping[str, Mapping[str, Any]]

_WIRE_GOAL, _START_GOAL_SECS = 1.05, 8.0
_EMBEDDING_GOAL = 1.2


def table(record: Mapping[str, Any]) -> str:
    """The whole record as Markdown."""
    results: Results = record["results"]
    machine, versions = record["machine"], record["versions"]
    lines = [
        f"`{record['command'].strip()}`: {record['seconds'] / 60:.0f} min on {machine['cores']} cores, "
        f"{machine['system']};",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
        "",
        "| race | contender | steps/s (median) | lowest to highest | examples/s | CPU s / 1000 steps "
        "| wire / (2 x parameters) | largest task, MiB | start to first step, s |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    race_before = ""
    for row in results.values():
        race = f"{WORKLOADS[row['workload']].title}, {'sync' if row['sync'] else 'async'}"
        name = row["name"] + (", Adam" if row["optimizer"] == "adam" else "")
        if row["chosen"]:
            name += f" ({row['chosen']} at once)"
        wire = "" if row["wire_ratio"] is None or row["workload"] in ("null", "sleep") else f"{row['wire_ratio']:.2f}"
        if row["workload"].startswith("embedding"):
            wire = ""
        lines.append(
            f"| {race if race != race_before else ''} | {name} | {_short(row['steps_per_sec'])} "
            f"| {_short(row['lowest'])} to {_short(row['highest'])} | {_short(row['examples_per_sec'])} "
            f"| {row['cpu_secs_per_1000_steps']:.2f} | {wire} | {row['memory_mib']['largest']:.0f} "
            f"| {row['start_secs']:.1f} |"
        )
        race_before = race
    lines += ["", "| goal | ratio | wanted | |", "|---|---:|---:|---|", *_goals(results)]
    if record["accuracy"]:
        lines += [
            "",
            "| MNIST, 97 % | seconds to it (median) | seeds that reached it | final accuracy, lowest to highest |",
            "|---|---:|---:|---:|",
        ]
        for name, row in record["accuracy"].items():
            secs = "" if row["secs"] is None else f"{row['secs']:.1f}"
            finals = f"{row['final']:.4f}, {row['lowest']:.4f} to {row['highest']:.4f}"
            lines.append(f"| {name} | {secs} | {row['reached']} | {finals} |")
    return "\n".join(lines) + "\n"


def _goals(results: Results) -> list[str]:
    medians = {key: row["steps_per_sec"] for key, row in results.items()}
    lines = []
    for goal in GOALS:
        ratio = goal.ratio(medians)
        if ratio is not None:
            lines.append(_goal(f"{goal.what} / {goal.against}", ratio, ">=", goal.at_least))
    tables = [results.get(f"embedding_{rows}/sgd/async/kdist") for rows in ("10k", "1M")]
    if tables[0] and tables[1]:
        ratio = tables[0]["steps_per_sec"] / tables[1]["steps_per_sec"]
        lines.append(_goal("embedding 10k / embedding 1M, kdist", ratio, "<=", _EMBEDDING_GOAL))
    for key in ("mlp", "deep", "cnn", "wide"):
        row = results.get(f"{key}/sgd/async/kdist")
        if row and row["wire_ratio"] is not None:
            lines.append(_goal(f"wire bytes / (2 x parameter bytes), {key}", row["wire_ratio"], "<=", _WIRE_GOAL))
    if row := results.get("mlp/sgd/async/kdist"):
        lines.append(_goal("start to first step, 2ps2w, s", row["start_secs"], "<=", _START_GOAL_SECS))
    return lines


def _goal(what: str, ratio: float, sign: str, wanted: float) -> str:
    reached = ratio >= wanted if sign == ">=" else ratio <= wanted
    return f"| {what} | {ratio:.2f} | {sign} {wanted:.2f} | {'reached' if reached else 'not reached'} |"


def draw(results: Results, path: Path) -> None:
    """A bar for each contender, a panel for each race, with the lowest and highest turn."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in results.values():
        if row["optimizer"] == "sgd" and "hooks" not in row["name"]:
            title = f"{WORKLOADS[row['workload']].title}, {'sync' if row['sync'] else 'async'}"
            panels.setdefault(title, []).append(row)
    if not panels:
        return
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 2.2 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, found) in zip(axes.flat, panels.items(), strict=False):
        names = [row["name"] for row in found]
        medians = [row["steps_per_sec"] for row in found]
        below = [row["steps_per_sec"] - row["lowest"] for row in found]
        above = [row["highest"] - row["steps_per_sec"] for row in found]
        colors = ["tab:blue" if name.startswith("kdist") else "tab:gray" for name in names]
        axis.barh(names, medians, xerr=[below, above], color=colors, ecolor="black", capsize=2)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=8)
    figure.supxlabel("global steps per second")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _short(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.1f}"
