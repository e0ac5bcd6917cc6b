"""All programs, and the numbers of the last run that was recorded: `make programs` records one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from programs import generative, language, loops, representations, tables, vision
from programs.program import KERAS, PLACES

RECORD = Path(__file__).with_name("results.json")
PROGRAMS = [p for module in (generative, representations, vision, language, tables, loops) for p in module.PROGRAMS]

# The last value of the history, by program and then by where it was trained.
Numbers = dict[str, dict[str, float]]


def collected(results: Iterable[tuple[str, str, float]]) -> Numbers:
    """The numbers of single tests, given as program, place and number."""
    numbers: Numbers = {}
    for title, place, number in results:
        numbers.setdefault(title, {})[place] = number
    return numbers


def recorded() -> Numbers:
    return json.loads(RECORD.read_text())


def record(numbers: Numbers) -> None:
    """Writes what a run found over what an earlier one did."""
    before = recorded() if RECORD.exists() else {}
    merged = {p.title: before.get(p.title, {}) | numbers.get(p.title, {}) for p in PROGRAMS}
    RECORD.write_text(json.dumps(merged, indent=1) + "\n")


def table(numbers: Numbers) -> Iterator[str]:
    """A table in Markdown, a line for each program that has numbers."""
    places = (KERAS, *PLACES)
    yield f"| program | value | {' | '.join((KERAS, *(f'`{place}`' for place in PLACES)))} |"
    yield "| --- | --- |" + " --- |" * len(places)
    for program in PROGRAMS:
        if found := numbers.get(program.title):
            numbers_there = {place: f"{number:.4g}" for place, number in found.items()}
            cells = [numbers_there.get(place, "refused" if place in program.refused else "") for place in places]
            mark = " \\*" if program.draws else ""
            yield f"| {program.title}{mark} | {program.shows.replace('_', ' ')} | {' | '.join(cells)} |"
