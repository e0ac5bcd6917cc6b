"""Runs that differ in their seed only, as one: mean, standard deviation and number; as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kdist.sweeps.load import Row

#: Columns other than metrics of which larger values are better.
_RATES = ("steps_per_second", "examples_per_second", "global_step")


@dataclass(frozen=True)
class Spread:
    """A value over several runs.

    Attributes:
        mean: the mean of the values.
        deviation: their standard deviation; None for a single one.
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[Any]) -> Spread | None:
        """The spread of the numbers among the values; None if there is none."""
        numbers = [float(value) for value in values if value is not None and math.isfinite(value)]
        if not numbers:
            return None
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)

    def text(self, form: str) -> str:
        """`0.9712 ± 0.0031`, in a format such as `.4g`; the deviation has at least two digits."""
        if self.deviation is None:
            return format(self.mean, form)
        return f"{self.mean:{form}} ± {self.deviation:{'.0f' if self.deviation >= 100 else '.2g'}}"


@dataclass(frozen=True)
class Group:
    """Runs with the same values of some keys.

    Attributes:
        values: the values by key.
        rows: the rows of the runs.
    """

    values: Mapping[str, Any]
    rows: Sequence[Row]

    def spread(self, column: str) -> Spread | None:
        """A column over the runs that are done."""
        return Spread.of(row.get(column) for row in self.rows if row["status"] == "done")


def group_by(rows: Iterable[Row], keys: Sequence[str]) -> list[Group]:
    """The runs by their values of these keys, in the order in which they appear."""
    groups: dict[str, Group] = {}
    for row in rows:
        values = {key: row[key] for key in keys}
        group = groups.setdefault(repr(values), Group(values, []))
        groups[repr(values)] = Group(values, [*group.rows, row])
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
    counts = {
        status: sum(row["status"] == status for row in rows) for status in dict.fromkeys(r["status"] for r in rows)
    }
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {status}" for status, n in counts.items())


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
    return [lines[0], "-+-".join("-" * width for width in widths), *lines[1:]]
