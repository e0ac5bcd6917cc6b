"""Programs as on keras.io, and with keras-hub and keras-rs, train as with plain Keras: see docs/compatibility.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs.program import KERAS, PLACES, Program, Values
from programs.results import PROGRAMS

import kdist


@pytest.fixture(scope="module")
def with_keras() -> dict[str, Values]:
    """The histories of plain Keras, by title; each program is trained once for all places."""
    return {}


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.title, marks=pytest.mark.xdist_group(p.title)) for p in PROGRAMS]
)
def test_a_program_trains_as_with_keras(
    program: Program, place: str, run_dir: Path, with_keras: dict[str, Values], record_property: Any
) -> None:
    if not program.can_run():
        pytest.skip(f"{program.needs} is not installed; make long does it")
    if place in program.refused:
        with pytest.raises(kdist.ConfigError):
            program.train(place, run_dir)
        return
    if program.title not in with_keras:
        with_keras[program.title] = program.train(KERAS, run_dir)
    expected = with_keras[program.title]
    values = program.train(place, run_dir)
    for where, found in ((KERAS, expected), (place, values)):
        record_property("program", (program.title, where, found[program.shows][-1]))
    program.compare(values, expected, place)
