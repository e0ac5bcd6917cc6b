from collections.abc import Iterator
from pathlib import Path

import pytest
from drilling import Drill, record


@pytest.fixture
def drill(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Drill]:
    """Starts runs, and ends those that a failed test leaves; what is reported goes into the table of all drills."""
    drill = Drill(tmp_path)
    yield drill
    for run in drill.runs:
        run.abandon()
    record(request, drill.reports)
