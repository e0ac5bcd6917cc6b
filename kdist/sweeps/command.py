"""`kdist runs FOLDER`: the runs below a folder as a table, with one row for runs that differ in their seed only."""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Iterable, Sequence

from kdist.config.suggestions import did_you_mean
from kdist.errors import ConfigError
from kdist.sweeps.groups import HEADS, Group, cells, group_by, sort_by, table, terminal_width
from kdist.sweeps.load import SEED, SPEED, Runs, runs_below


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kdist runs",
        description="Compares runs; those that differ only in their seed are one row: mean ± standard deviation.",
    )
    parser.add_argument("folder", help="holds run dirs or sweeps, at any depth; also s3://bucket/folder")
    parser.add_argument(
        "--group-by", metavar="KEYS", help="keys of a row, as strategy,cluster; default: all that differ"
    )
    parser.add_argument("--columns", metavar="NAMES", help="as status,run,train/loss: any columns of load_runs")
    parser.add_argument("--sort", metavar="COLUMN", help="ascending by this column; descending by -COLUMN")
    parser.add_argument("--csv", action="store_true", help="print CSV, with the deviation in a column of its own")
    # Else a value that begins with a dash is taken for an option.
    options = parser.parse_args("\0".join(arguments).replace("--sort\0-", "--sort=-").split("\0") if arguments else [])
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    runs = runs_below(options.folder)
    differing = [key for key in runs.varied() if key != SEED]
    keys = differing if options.group_by is None else options.group_by.split(",")
    sort = (options.sort or "").removeprefix("-")
    shown = _default_columns(runs, keys, sort) if options.columns is None else options.columns.split(",")
    columns = {name: name for name in runs.columns} | {head: name for name, head in HEADS.items()}
    for option, names in (("--group-by", keys), ("--sort", [sort] if sort else []), ("--columns", shown)):
        _check(option, names, columns)
    groups = group_by(runs.rows, [columns[key] for key in keys])
    if sort:
        groups = sort_by(groups, columns[sort], descending=options.sort.startswith("-"))
    if options.csv:
        _write_csv(runs, keys, groups)
        return 0
    found = {HEADS.get(columns[name], name): cells(groups, columns[name]) for name in shown}
    # Columns that were asked for are all shown.
    width = terminal_width() if options.columns is None else None
    lines = table(found, width, f"show them with --columns {','.join(shown[:2])},...")
    print("\n".join(lines + [f"{name} failed: {error}" for name, error in runs.errors.items()]))
    return 0


def _check(option: str, names: Sequence[str], columns: Iterable[str]) -> None:
    for name in names:
        if name not in columns:
            ends = [column for column in columns if column.endswith((f".{name}", f"/{name}"))]
            hint = f"did you mean {' or '.join(ends)}?" if ends else did_you_mean(name, columns)
            raise ConfigError(
                f"{option} {name}: there is no such column; {hint or 'choose from ' + ', '.join(columns)}"
            )


def _default_columns(runs: Runs, keys: Sequence[str], sort: str) -> list[str]:
    """The state of the runs, their main metric, which is a loss that all of them have, and all keys that differ."""
    splits = ("best", "validation", "train")
    metrics = sorted(runs.metrics, key=lambda name: (splits.index(name.partition("/")[0]), not name.endswith("/loss")))
    differing = dict.fromkeys([*keys, *(key for key in runs.varied() if key != SEED)])
    seeds = ["seed"] if len({row["seed"] for row in runs.rows}) > 1 else []
    done = [row for row in runs.rows if row["status"] == "done"]
    in_all = [name for name in metrics if all(row[name] is not None for row in done)]
    first = ["status", "run", "global_step", *(in_all or metrics)[:1], "steps_per_second"]
    return list(dict.fromkeys([*first, *([sort] if sort else []), *differing, *seeds]))


def _write_csv(runs: Runs, keys: Sequence[str], groups: Sequence[Group]) -> None:
    columns = [name for name in (*runs.metrics, *SPEED) if name not in keys]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*keys, "runs", "done", *(text for name in columns for text in (name, f"{name} deviation"))])
    for group in groups:
        spreads = [group.spread(name) for name in columns]
        cells = [value for s in spreads for value in ((None, None) if s is None else (s.mean, s.deviation))]
        done = sum(row["status"] == "done" for row in group.rows)
        writer.writerow([*(group.values[key] for key in keys), len(group.rows), done, *cells])
