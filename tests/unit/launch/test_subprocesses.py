"""What the process that started a fit in subprocesses shows of what its chief prints."""

import os
import warnings
from pathlib import Path

import pytest

from kdist.console.lines import save_line
from kdist.launch.subprocesses import WorkerProcesses
from kdist.log import Line


def relayed(printed: str, print_line: object) -> list[str]:
    """The warnings that come of what was printed."""
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write(printed)
    tasks = WorkerProcesses(2, Path(), 1.0, 1.0, 0, None, 1.0, (), print_line)
    with warnings.catch_warnings(record=True) as said, open(reading) as printed_here:
        warnings.simplefilter("always")
        tasks._relay(printed_here)
    return [str(warning.message) for warning in said]


def test_lines_are_printed_and_warnings_are_warnings() -> None:
    lines: list[str] = []
    assert relayed("one\n\n\x1ecareful\ntwo", lines.append) == ["careful"]
    assert lines == ["one", "", "two"]


def test_a_line_of_kdist_stays_one_behind_half_a_line_of_the_users() -> None:
    lines: list[str] = []
    line = save_line(4, 9, Path("checkpoints/ckpt-4"))
    assert relayed(f"half\x1d{line.to_json()}\n", lines.append) == []
    assert lines == ["half", line]
    assert isinstance(lines[1], Line)
    assert (lines[1].event, lines[1].step) == ("save", 4)


def test_a_warning_behind_half_a_line_is_a_warning() -> None:
    lines: list[str] = []
    assert relayed("...\x1ecareful\n.\n", lines.append) == ["careful"]
    assert lines == ["...", "."]


def test_all_is_read_from_a_chief_even_if_nobody_wants_it() -> None:
    seen: list[str] = []

    def is_gone(line: str) -> None:
        seen.append(line)
        raise BrokenPipeError("the console is gone")

    assert relayed("one\ntwo\n", is_gone) == []
    assert seen == ["one", "two"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_task_that_says_nothing_is_lost(tmp_path: Path, index: int) -> None:
    tasks = WorkerProcesses(2, tmp_path, 1.0, 1.0, 0, None, 1.0, ())
    (tmp_path / f"worker-{index}.log").write_text("the last it said\n")
    outcome = tasks._outcome_of(index, -9, tmp_path)
    assert f"worker:{index} died (signal 9, SIGKILL)" in str(outcome.error)
    assert "the last it said" in str(outcome.error)
