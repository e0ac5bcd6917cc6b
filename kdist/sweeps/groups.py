"""Runs that differ in their seed only, as one: mean and standard deviation; as a table."""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from kdist import log
from kdist.sweeps.load import METRIC_SPLITS, MODEL, SPEED, Row, as_numbered

#: The column of a sweep's objectives.
OBJECTIVE = "objective"
#: Columns of which a group shows the mean, beside metrics.
_AVERAGED = (OBJECTIVE, *SPEED[:4])
#: Columns with another name at their head.
HEADS = {"global_step": "step", "steps_per_second": "steps/s", "examples_per_second": "examples/s"}
#: Several values with more characters than this are shown as their number.
_LONGEST_LIST = 16


class Spread(NamedTuple):
    """The mean of a value over several runs, and its standard deviation; None for a single run."""

    mean: float
    deviation: float | None


class Group(NamedTuple):
    """Runs with the same values of some keys."""

    values: Mapping[str, Any]
    rows: list[Row]

    def spread(self, column: str) -> Spread | None:
        """The numbers in a column of the runs that are done; None if there is none."""
        values = (row.get(column) for row in self.rows if row["status"] == "done")
        numbers = [float(value) for value in values if value is not None and math.isfinite(value)]
        if not numbers:
            return None
        return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


def group_by(rows: Iterable[Row], keys: Sequence[str], *, mixed: bool = False) -> list[Group]:
    """The runs by their values of these keys, in the order in which they appear.

    Unless `mixed`, runs of different models or losses are different groups: a mean over their metrics means nothing.
    """
    groups: dict[str, Group] = {}
    for row in rows:
        values = {key: row[key] for key in keys}
        model = None if mixed else row.get(MODEL)
        groups.setdefault(repr((values, model)), Group(values, [])).rows.append(row)
    return list(groups.values())


def sort_by(groups: Iterable[Group], column: str, *, descending: bool) -> list[Group]:
    """Sorted by a column, a number by its mean, groups without a value last."""

    def value(group: Group) -> Any:
        if not _is_averaged(column):
            return group.rows[0].get(column)
        spread = group.spread(column)
        return None if spread is None else spread.mean

    def place(group: Group) -> Any:
        # Values of a key may be numbers and texts.
        found = value(group)
        return (1, as_numbered(found)) if isinstance(found, str) else (0, found)

    groups = list(groups)
    found = sorted((group for group in groups if value(group) is not None), key=place, reverse=descending)
    return found + [group for group in groups if value(group) is None]


def _is_averaged(column: str) -> bool:
    """True if a group shows the mean of a column, and not its values."""
    return column in _AVERAGED or column.startswith(METRIC_SPLITS)


def cells(groups: Sequence[Group], column: str) -> list[str]:
    """A column of a table with a row per group."""
    if column == "status":
        return [status_of(group.rows) for group in groups]
    if _is_averaged(column):
        return _spread_texts([group.spread(column) for group in groups])
    return [list_text(row.get(column) for row in group.rows) for group in groups]


def _spread_texts(spreads: Sequence[Spread | None]) -> list[str]:
    """`0.9712 ± 0.0031`, aligned at the sign."""
    parts = [
        ("", "")
        if s is None
        else (number_text(s.mean), "" if s.deviation is None else f" ± {number_text(s.deviation, 2)}")
        for s in spreads
    ]
    mean_width, width = (max((len(pair[i]) for pair in parts), default=0) for i in (0, 1))
    return [f"{mean:>{mean_width}}{deviation:<{width}}" if mean else "" for mean, deviation in parts]


def number_text(value: float, digits: int = 4) -> str:
    """A number with so many digits that count, and all of its whole part: `0.9000`, `111.0`, `12346`."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:#.{digits}g}".rstrip(".")


def text_of(value: Any) -> str:
    """A value of a key in a table."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def list_text(values: Iterable[Any]) -> str:
    """Values in a row: `1,2,5`; whole numbers that follow each other as `1-9`; `0.1 +7` for many or long ones."""
    found = list(dict.fromkeys(value for value in values if value is not None))
    if all(type(value) is int for value in found):
        parts = []
        for _, run in groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 2 else ",".join(map(str, numbers)))
    else:
        parts = [text_of(value) for value in found]
    text = ",".join(parts)
    return text if len(found) < 2 or len(text) <= _LONGEST_LIST else f"{text_of(found[0])} +{len(found) - 1}"


def status_of(rows: Sequence[Row]) -> str:
    """`done`, or `2 done, 1 failed`."""
    counts = Counter(str(row["status"]) for row in rows)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())


def table(columns: Mapping[str, Sequence[str]], width: int | None = None, more: str = "") -> list[str]:
    """The lines of a table, from the cells of its columns by their heads, the most important first.

    If it is wider than `width`, it has the last parts of heads, `learning_rate` for `optimizer.learning_rate`; then
    without the columns that do not fit, and a line that names them and says `more`.
    """
    heads, room = {name: name for name in columns}, math.inf if width is None else width
    if _width(columns, heads) > room:
        counts = Counter(name.rpartition(".")[2] for name in columns)
        heads = {name: last if counts[last := name.rpartition(".")[2]] == 1 else name for name in columns}
    shown: dict[str, Sequence[str]] = {}
    for name, column in columns.items():
        if _width(wider := {**shown, name: column}, heads) <= room or not shown:
            shown = wider
    lines: list[list[str]] = []
    for name, column in shown.items():
        size = _width({name: column}, heads)
        is_number = all(map(_is_number, filter(None, column)))
        lines.append([f"{cell:>{size}}" if is_number else f"{cell:<{size}}" for cell in (heads[name], *column)])
    head, *rows = (" | ".join(row).rstrip() for row in zip(*lines))
    rule = "-+-".join("-" * len(column[0]) for column in lines)
    left_out = [name for name in columns if name not in shown]
    note = f"{len(left_out)} of {len(columns)} columns left out: {', '.join(left_out)}; {more}" if left_out else ""
    return [head, rule, *rows, *textwrap.wrap(note, width or 80, break_long_words=False, break_on_hyphens=False)]


def _width(columns: Mapping[str, Sequence[str]], heads: Mapping[str, str]) -> int:
    return sum(max(map(len, (heads[name], *column))) + 3 for name, column in columns.items()) - 3


def _is_number(cell: str) -> bool:
    with suppress(ValueError):
        float(cell.partition(" ± ")[0])
        return True
    return False


def terminal_width() -> int | None:
    """The columns of the terminal that standard output is; None if it is something else, such as a pipe."""
    return shutil.get_terminal_size().columns if log.Console.of(sys.stdout).isatty() else None
