"""The live line on a terminal, and nothing where there is none."""

import io

from rich.console import Console
from test_hooks import make_session
from test_session import run_all

from kdist.hooks import Progress, StopAtStep


def shown_by(terminal: Console) -> str:
    file = terminal.file
    run_all(make_session([Progress(terminal), StopAtStep(last_step=40)], last_step=40))
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_terminal_shows_where_training_is() -> None:
    shown = shown_by(Console(file=io.StringIO(), force_terminal=True, width=120))
    assert "step     40/40 | loss " in shown
    # It is gone at the end: what stays are the lines that were printed.
    assert shown.rstrip("\n").endswith("\x1b[2K")


def test_a_file_gets_nothing_of_it() -> None:
    assert shown_by(Console(file=io.StringIO(), width=120)) == ""
