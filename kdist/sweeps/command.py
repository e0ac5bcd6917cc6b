"""`kdist runs FOLDER`: the runs below a folder as a table, with one row for runs that differ in their seed only."""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Sequence

from kdist.errors import ConfigError
from kdist.sweeps.groups import Group, best_first, group_by, list_text, status_of, table, text_of
from kdist.sweeps.load import SEED, SPEED, Runs, runs_below

_SHOWN = ("steps_per_second", "staleness", "seconds")
_FORMS = {"steps_per_second": ".1f", "examples_per_second": ".1f", "staleness": ".2f", "seconds": ".1f"}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kdist runs",
        description="Compares runs: mean, standard deviation and number over those that differ in their seed only.",
    )
    parser.add_argument("folder", help="holds run dirs or sweeps, at any depth; also s3://bucket/folder")
    parser.add_argument("--group-by", metavar="KEYS", help="as strategy,cluster; default: all keys that differ")
    parser.add_argument("--sort", metavar="COLUMN", help="best first by this column, as best/accuracy")
    parser.add_argument("--csv", action="store_true", help="print CSV, with the deviation in a column of its own")
    options = parser.parse_args(arguments)
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    runs = runs_below(options.folder)
    differing = [key for key in runs.varied() if key != SEED]
    keys = differing if options.group_by is None else options.group_by.split(",")
    _check("--group-by", keys, runs.columns)
    _check("--sort", [options.sort] if options.sort else [], [*runs.metrics, *SPEED])
    groups = group_by(runs.rows, keys)
    if options.sort:
        groups = best_first(groups, options.sort, runs.modes)
    if options.csv:
        _write_csv(runs, keys, groups)
    else:
        print("\n".join(_table(runs, keys, groups, options.sort)))
    return 0


def _check(option: str, names: Sequence[str], columns: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in columns]:
        raise ConfigError(f"{option} {unknown[0]}: there is no such column; choose from {', '.join(columns)}")


def _table(runs: Runs, keys: Sequence[str], groups: Sequence[Group], sort: str | None) -> list[str]:
    """The groups with the metrics that say most, and the errors of failed runs."""
    shown = dict.fromkeys([*_telling(runs.metrics), *([sort] if sort else []), *_SHOWN])
    columns = [name for name in shown if name not in keys]
    rows = [
        [
            *(text_of(group.values[key]) for key in keys),
            str(len(group.rows)),
            list_text(row["seed"] for row in group.rows) if len(group.rows) < 10 else "...",
            *(group.text(name, _FORMS.get(name, ".4g")) for name in columns),
            status_of(group.rows),
        ]
        for group in groups
    ]
    failed = [f"{name} failed: {error}" for name, error in runs.errors.items()]
    return table([*keys, "runs", "seed", *columns, "status"], rows) + failed


def _telling(metrics: Sequence[str]) -> list[str]:
    """The best metrics of validation, or else the final ones, or the ones of training."""
    for split in ("best/", "validation/", "train/"):
        if found := [name for name in metrics if name.startswith(split)]:
            return found
    return []


def _write_csv(runs: Runs, keys: Sequence[str], groups: Sequence[Group]) -> None:
    columns = [name for name in (*runs.metrics, *SPEED) if name not in keys]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*keys, "runs", "done", *(text for name in columns for text in (name, f"{name} deviation"))])
    for group in groups:
        spreads = [group.spread(name) for name in columns]
        cells = [value for s in spreads for value in ((None, None) if s is None else (s.mean, s.deviation))]
        done = sum(row["status"] == "done" for row in group.rows)
        writer.writerow([*(group.values[key] for key in keys), len(group.rows), done, *cells])
