"""`metrics.csv`: loss, metrics and speed of a run, one line for each report, appended while it trains.

A line has a `kind`: `train`, the steps since the last such line, whenever `LoggingTensor` reports; `validation`, the
parameters of its step; `epoch`, an epoch of Keras's `History`, with `val_` before the names of validation; `resize`,
with the numbers of `workers` and `servers` from then on. An empty cell is a value that the line does not have.

Lines are written whole. A file that a killed process has left may end in half a line, which counts as not written.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kdist.errors import ConfigError
from kdist.log import warn
from kdist.storage.files import make_private, write_whole
from kdist.storage.folder import Folder
from kdist.storage.lock import check_not_taken_over

NAME = "metrics.csv"
TRAIN, VALIDATION, EPOCH, RESIZE = "train", "validation", "epoch", "resize"
#: The first columns; those of metrics follow, first those of training.
COLUMNS = ("step", "epoch", "kind", "seconds", "learning_rate", "steps_per_second", "staleness")
#: Added to the name of a metric that is that of one of the first columns.
_OF_A_METRIC = " (metric)"

Row = dict[str, Any]


class Epoch(NamedTuple):
    """An epoch in `History`: the global step at its end, its number from 0, and its loss and metrics."""

    step: int
    epoch: int
    logs: dict[str, Any]


class MetricsFile:
    """Writes the file of one run, whose folder it gets. If that fails, it warns once, and training continues."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        #: The columns of the file; None if they are not known.
        self._columns: list[str] | None = None
        self._has_warned = False

    def begin(self, step: int) -> list[Row]:
        """Deletes rows of later steps, which will be trained again, and half a line at the end; returns the others.

        A damaged file is renamed to `metrics-damaged.csv`, with a warning.
        """
        self._columns = None
        rows: list[Row] = []
        try:
            content = _content_of(self.path)
            rows = [row for row in rows_in(content, self.path) if row["step"] <= step]
            if content:
                self._rewrite(rows)
        except ConfigError as error:
            damaged = self.path.with_name("metrics-damaged.csv")
            warn(f"{error}; it is {damaged.name} now, and this run begins a new one")
            os.replace(self.path, damaged)
        except OSError as error:
            self._warn(error)
            return []
        return rows

    def append(self, values: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Writes a line: `values` of `COLUMNS`, and `metrics` by name, with `val_` before those of validation."""
        check_not_taken_over(Folder(self.path.parent))
        row = dict(values)
        for name, value in metrics.items():
            is_taken = name in COLUMNS and name != "learning_rate"
            row[name + _OF_A_METRIC if is_taken else name] = value
        try:
            if self._columns is None or any(name not in self._columns for name in row):
                self._rewrite([*read_rows(self.path.parent), row])
            else:
                with self.path.open("ab", buffering=0) as file:
                    line = _line(row.get(name) for name in self._columns).encode()
                    if file.write(line) != len(line):
                        self._columns = None
        except (OSError, ConfigError) as error:
            self._columns = None
            self._warn(error)

    def _rewrite(self, rows: Sequence[Row]) -> None:
        metrics = {name: None for row in rows for name in row if name not in COLUMNS}
        columns = [*COLUMNS, *sorted(metrics, key=lambda name: name.startswith("val_"))]
        make_private(self.path.parent)
        write_whole(self.path, _line(columns) + "".join(_line(row.get(name) for name in columns) for row in rows))
        self._columns = columns

    def _warn(self, error: OSError | ConfigError) -> None:
        if not self._has_warned:
            self._has_warned = True
            why = getattr(error, "strerror", None) or error
            warn(f"{self.path}: cannot be written: {why}; training continues without it")


def read_rows(folder: Path) -> list[Row]:
    """The rows of the file in a run dir, none without a file; raises `ConfigError` if it is damaged."""
    path = folder / NAME
    return rows_in(_content_of(path), path)


def rows_in(content: bytes, place: object) -> list[Row]:
    """The rows of a file, numbers by column, and the kind, without half a line at its end.

    Raises `ConfigError` with the `place` of the file if it is damaged.
    """
    whole = content[: content.rfind(b"\n") + 1]
    # A metric may have thousands of values.
    limit = csv.field_size_limit(max(csv.field_size_limit(), len(whole)))
    try:
        heads, *lines = list(csv.reader(io.StringIO(whole.decode()))) or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{place}: is damaged: {error}") from None
    finally:
        csv.field_size_limit(limit)
    if whole and not {"step", "epoch", "kind"} <= set(heads):
        raise ConfigError(f"{place}: is no metrics.csv of kdist: its first line has no step, epoch and kind")
    rows = []
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(heads):
            raise ConfigError(f"{place}: line {number} is damaged: it has {len(cells)} of {len(heads)} values")
        try:
            rows.append({name: _value(name, cell) for name, cell in zip(heads, cells) if cell})
            _ = rows[-1]["step"], rows[-1]["epoch"], rows[-1]["kind"]
        except (ValueError, KeyError):
            raise ConfigError(f"{place}: line {number} is damaged: {','.join(cells)[:100]}") from None
    return rows


def metrics_of(row: Row) -> dict[str, Any]:
    return {name.removesuffix(_OF_A_METRIC): value for name, value in row.items() if name not in COLUMNS}


def epochs_of(
    rows: Iterable[Row], *, after: int, until: int, are_complete: bool = True, with_learning_rate: bool = False
) -> list[Epoch]:
    """The epochs that ended after one step and not after another, as `History` had them.

    Args:
        are_complete: True if epochs have a known length: then an epoch that was stopped in its middle and continued
            counts once, with its last row.
        with_learning_rate: True if callbacks had added the learning rate to the logs of epochs.
    """
    added = ("learning_rate",) if with_learning_rate else ()
    found = [
        Epoch(row["step"], row["epoch"], metrics_of(row) | {name: row[name] for name in added if name in row})
        for row in rows
        if row["kind"] == EPOCH and after < row["step"] <= until
    ]
    return list({epoch.epoch: epoch for epoch in found}.values()) if are_complete else found


def _content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([_cell(value) for value in values])
    return line.getvalue()


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, np.ndarray):
        return json.dumps(value.tolist())
    return str(value if isinstance(value, int) else float(value))


def _value(name: str, cell: str) -> Any:
    if name == "kind":
        return cell
    if name in ("step", "epoch"):
        return int(cell)
    return np.array(json.loads(cell), np.float32) if cell.startswith("[") else float(cell)
