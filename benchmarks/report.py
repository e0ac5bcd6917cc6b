"""The results of the races, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.races import GOALS, is_another_algorithm
from benchmarks.workloads import WORKLOADS

Results = Mapping[str, Mapping[str, Any]]

_WIRE_GOAL, _START_GOAL_SECS, _HOOKS_GOAL = 1.05, 6.0, 0.99

_HEADER = [
    *("race", "contender", "steps/s (median):", "lowest to highest:", "examples/s:", "ids/s:", "CPU ms / batch:"),
    *("wire / (2 x parameters):", "largest task, MiB:", "start to first step, s:"),
]
_COLUMNS = (
    *("kdist", "TF1", "tf_keras fit", "coordinator loop", "MultiWorkerMirrored", "PyTorch DDP"),
    *("one Keras process", "one PyTorch process", "kdist, fit of arrays"),
)
_ACCURACY_HEADER = [
    *("MNIST, 97 %", "seconds to it (median):", "seeds that reached it:", "final accuracy (median):"),
    "lowest to highest:",
]


def table(record: Mapping[str, Any]) -> str:
    """The whole record as Markdown."""
    results: Results = record["results"]
    machine, versions = record["machine"], record["versions"]
    same = {key: row for key, row in results.items() if not is_another_algorithm(row["name"])}
    others = {key: row for key, row in results.items() if key not in same}
    lines = [
        f"`{record['command'].strip()}`: {record['seconds'] / 60:.0f} min on {machine['cores']} cores, "
        f"{machine['system']};",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
        *_section("Steps per second", ["race", *(f"{name}:" for name in _COLUMNS)], _overview(same)),
        *_section("Races", _HEADER, _rows(same)),
        *_section("Goals", ["goal", "ratio:", "wanted:", ""], [*_goals(results), *_hook_goal(record["hooks"])]),
        *_section("Other algorithms", _HEADER, _rows(others)),
        *_section("A checkpoint", ["kdist", "training stands still, ms:"], _stalls(results)),
        *_section("Accuracy", _ACCURACY_HEADER, _accuracies(record["accuracy"])),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table under a title; columns whose name ends with a colon are numbers. Nothing if there are no rows."""
    if not rows:
        return []
    bars = ["---:" if name.endswith(":") else "---" for name in header]
    names = [name.removesuffix(":") for name in header]
    return ["", f"## {title}", "", *(f"| {' | '.join(cells)} |" for cells in [names, bars, *rows])]


def _overview(results: Results) -> list[list[str]]:
    """Medians of global steps per second: a row for each race, a column for each contender."""
    by_race: dict[str, dict[str, str]] = {}
    for row in results.values():
        if row["optimizer"] == WORKLOADS[row["workload"]].optimizer and row["name"] in _COLUMNS:
            by_race.setdefault(_race(row), {})[row["name"]] = _short(row["steps_per_sec"])
    return [[race, *(found.get(name, "") for name in _COLUMNS)] for race, found in by_race.items()]


def _race(row: Mapping[str, Any]) -> str:
    return f"{WORKLOADS[row['workload']].title}, {'sync' if row['sync'] else 'async'}"


def _rows(results: Results) -> list[list[str]]:
    rows = []
    race_before = ""
    for row in results.values():
        race = _race(row)
        settings = [f"{row['steps_at_once']} steps at once"] * bool(row["steps_at_once"])
        settings += ["a core each"] * row["keeps_to_cores"]
        name = row["name"] + ", Adam" * (row["optimizer"] == "adam") + f" ({', '.join(settings)})" * bool(settings)
        rows.append(
            [
                race if race != race_before else "",
                name,
                _short(row["steps_per_sec"]),
                f"{_short(row['lowest'])} to {_short(row['highest'])}",
                _short(row["examples_per_sec"]),
                _short(row["ids_per_sec"]) if row["ids_per_sec"] else "",
                f"{row['cpu_ms_per_batch']:.2f}",
                f"{row['wire_ratio']:.2f}" if row["wire_ratio"] is not None and _moves_all(row) else "",
                f"{row['memory_mib']['largest']:.0f}",
                f"{row['start_secs']:.1f}",
            ]
        )
        race_before = race
    return rows


def _moves_all(row: Mapping[str, Any]) -> bool:
    """Whether what travels in a step is all the parameters and little else."""
    return row["workload"] in ("mlp", "deep", "cnn", "wide")


def _stalls(results: Results) -> list[list[str]]:
    return [
        [WORKLOADS[row["workload"]].title, f"{1000 * row['save_secs']:.0f}"]
        for row in results.values()
        if row["save_secs"] is not None and row["name"] == "kdist" and row["optimizer"] == "sgd" and not row["sync"]
    ]


def _accuracies(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    return [
        [
            name,
            "" if row["secs"] is None else f"{row['secs']:.1f}",
            f"{row['reached']} of {row['seeds']}",
            f"{row['final']:.4f}",
            f"{row['lowest']:.4f} to {row['highest']:.4f}",
        ]
        for name, row in found.items()
    ]


def _goals(results: Results) -> list[list[str]]:
    turns = {key: row["turns"] for key, row in results.items()}
    lines = []
    for goal in GOALS:
        ratio = goal.ratio(turns)
        if ratio is not None:
            lines.append(_goal(f"{goal.what} / {goal.against}", ratio, ">=", goal.at_least))
    for key in ("mlp", "deep", "cnn", "wide"):
        row = results.get(f"{key}/sgd/async/kdist")
        if row and row["wire_ratio"] is not None:
            lines.append(_goal(f"wire bytes / (2 x parameter bytes), {key}", row["wire_ratio"], "<=", _WIRE_GOAL))
    if row := results.get("mlp/sgd/async/kdist"):
        lines.append(_goal("start to first step, 2ps2w, s", row["start_secs"], "<=", _START_GOAL_SECS))
    return lines


def _hook_goal(measured: Mapping[str, float]) -> list[list[str]]:
    if not measured:
        return []
    return [_goal("mlp/sgd/async/kdist, default hooks on / off", measured["ratio"], ">=", _HOOKS_GOAL)]


def _goal(what: str, ratio: float, sign: str, wanted: float) -> list[str]:
    reached = ratio >= wanted if sign == ">=" else ratio <= wanted
    return [what, f"{ratio:.2f}", f"{sign} {wanted:.2f}", "reached" if reached else "not reached"]


def draw(results: Results, path: Path) -> None:
    """A bar for each contender, a panel for each race, with the lowest and highest turn."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[Mapping[str, Any]]] = {}
    for row in results.values():
        if row["optimizer"] == WORKLOADS[row["workload"]].optimizer and not is_another_algorithm(row["name"]):
            panels.setdefault(_race(row), []).append(row)
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
