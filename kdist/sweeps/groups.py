"""Runs that differ in their seed only, as one: mean, standard deviation and number; as a table."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kdist.sweeps.load import Row

#: Columns other than metrics of which larger values are better.
_RATES = ("steps_per_second", "examples_per_second", "global_step")


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

    def text(self, column: str, form: str) -> str:
        """`0.9712 ± 0.0031`, in a format such as `.4g`; the deviation has at least two digits."""
        if (spread := self.spread(column)) is None:
            return ""
        mean, deviation = spread
        around = "" if deviation is None else f" ± {deviation:{'.0f' if deviation >= 100 else '.2g'}}"
        return f"{mean:{form}}{around}"


def group_by(rows: Iterable[Row], keys: Sequence[str]) -> list[Group]:
    """The runs by their values of these keys, in the order in which they appear."""
    groups: dict[str, Group] = {}
    for row in rows:
        values = {key: row[key] for key in keys}
        groups.setdefault(repr(values), Group(values, [])).rows.append(row)
    return list(groups.values())


def best_first(groups: Iterable[Group], column: str, modes: Mapping[str, str]) -> list[Group]:
    """Sorted by the mean of a column, groups without one last."""
    sign = -1 if modes.get(column, "max" if column in _RATES else "min") == "max" else 1

    def place(group: Group) -> tuple[bool, float]:
        found = group.spread(column)
        return (found is None, 0.0 if found is None else sign * found.mean)

    return sorted(groups, key=place)


def text_of(value: Any) -> str:
    """A value of a key in a table."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def list_text(values: Iterable[Any]) -> str:
    """Values in a row: `1,2,5`; whole numbers that follow each other as `1-9`."""
    found = list(dict.fromkeys(value for value in values if value is not None))
    if not all(isinstance(value, int) for value in found):
        return ",".join(map(text_of, found))
    parts = []
    for _, run in groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 2 else ",".join(map(str, numbers)))
    return ",".join(parts)


def status_of(rows: Sequence[Row]) -> str:
    """`done`, or `2 done, 1 failed`."""
    counts = Counter(str(row["status"]) for row in rows)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
    return [lines[0], "-+-".join("-" * width for width in widths), *lines[1:]]
