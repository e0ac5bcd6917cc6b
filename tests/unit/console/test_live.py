"""The live line: on a terminal or in a notebook, and nowhere else."""

import io
import re
import sys
from collections.abc import Callable

import pytest
from fakes import make_session, run_all
from rich.console import Console

from kdist import log
from kdist.console import live as live_line
from kdist.console.live import LiveLine, TerminalLine
from kdist.hooks import Progress, StopAtStep


def train(make_line: Callable[[], LiveLine | None]) -> None:
    run_all(make_session([Progress(make_line), StopAtStep(last_step=40)], last_step=40))


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def written_to(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_where_training_is() -> None:
    wide = terminal(width=120)
    train(lambda: TerminalLine(wide))
    shown = written_to(wide)
    assert "step     40/40 | loss " in shown
    # It is gone at the end: what stays are the lines that were printed.
    assert shown.rstrip("\n").endswith("\x1b[2K")


def test_a_narrow_terminal_shows_the_columns_that_fit() -> None:
    """A line that wraps would leave remnants."""
    narrow = terminal(width=40)
    line = TerminalLine(narrow)
    columns = ["step    100/2000", "loss 0.4213", "accuracy 0.8750", "412.3 steps/s", "ETA 5s", "staleness 1.0"]
    line.show(100, 2000, columns)
    line.close()
    shown = " ".join(written_to(narrow).split())
    assert "step 100/2000 | loss 0.4213" in shown
    assert "ETA" not in shown


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_ctrl_c_behind_the_line_stays_in_it(width: int) -> None:
    """In a line of its own, rich would erase the wrong one."""
    console = terminal(width)
    line = TerminalLine(console)
    line.show(100, 2000, [f"column {i} of a long line" for i in range(20)])
    line.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", written_to(console))
    widths = [len(text.rstrip()) for text in shown.splitlines() if text.strip()]
    assert widths
    assert max(widths) == width - len("^C^C")


def test_a_file_gets_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    train(live_line.live_line)
    assert capsys.readouterr().out == ""


class Cell:
    """Stands in for IPython and the output of a cell, where displays are updated in place."""

    def __init__(self) -> None:
        self.kernel = object()
        self.outputs: list[list[str]] = []

    def get_ipython(self) -> "Cell":
        return self

    def display(self, content: dict[str, str], *, raw: bool, display_id: bool) -> "Cell":
        assert raw
        assert display_id
        self.outputs.append([content["text/plain"]])
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.outputs[-1].append(content["text/plain"])


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", cell)
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    return cell


def test_a_notebook_shows_one_line_that_changes_in_its_place(cell: Cell) -> None:
    train(live_line.live_line)
    ((created, prepared, first, *_, last),) = cell.outputs
    assert (created, prepared, last) == ("", "preparing the first steps", "")
    assert first.startswith("step ")
    assert "/40 | loss " in first


def test_there_is_no_line_among_json(cell: Cell) -> None:
    with log.in_format("json"):
        assert live_line.live_line() is None
    assert cell.outputs == []
