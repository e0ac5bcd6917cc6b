"""The live line: on a terminal of this process, or on that of another, and nowhere else."""

import io
import json
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest
from fakes import make_session, run_all
from rich.console import Console

from kdist import log
from kdist.console import live as live_line
from kdist.console.live import LiveLine, LivePipe, SentLine, TerminalLine, pipe_writer
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


def test_a_narrow_terminal_shows_every_column() -> None:
    narrow = terminal(width=40)
    line = TerminalLine(narrow)
    columns = ["step    100/2000", "loss 0.4213", "accuracy 0.8750", "412.3 steps/s", "ETA 5s", "staleness 1.0"]
    line.show(100, 2000, columns)
    line.close()
    shown = " ".join(written_to(narrow).split())
    assert all(" ".join(column.split()) in shown for column in columns)


def test_a_file_gets_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    train(live_line.live_line)
    assert capsys.readouterr().out == ""


def test_another_process_shows_what_is_sent_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    train(lambda: SentLine(messages.append))
    assert all("\n" not in message for message in messages)
    screen = terminal(width=120)
    monkeypatch.setattr(live_line, "TerminalLine", lambda: TerminalLine(screen))
    pipe = LivePipe()
    for message in messages:
        pipe.receive(message)
    shown = written_to(screen)
    assert shown.index("preparing the first steps") < shown.index("| loss ")
    assert shown.rstrip("\n").endswith("\x1b[2K")


def test_a_step_may_be_a_number_of_numpys() -> None:
    messages: list[str] = []
    SentLine(messages.append).show(np.int64(1), np.int64(2), ["loss 1.0"])  # type: ignore[arg-type]
    assert json.loads(messages[0]) == {"show": [1, 2, ["loss 1.0"]]}


def test_what_comes_by_the_pipe_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(width=120)
    monkeypatch.setattr(live_line, "is_terminal", lambda: True)
    monkeypatch.setattr(live_line, "TerminalLine", lambda: TerminalLine(screen))
    with LivePipe() as pipe:
        assert pipe.descriptor is not None
        others = os.dup(pipe.descriptor)
        pipe.show()
        SentLine(pipe_writer(others)).show(1, 2, ["loss 0.4213"])
        os.close(others)
    assert "loss 0.4213" in written_to(screen)
    assert written_to(screen).rstrip("\n").endswith("\x1b[2K")


def test_a_pipe_that_was_never_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "is_terminal", lambda: True)
    with pytest.raises(KeyboardInterrupt), LivePipe() as pipe:
        raise KeyboardInterrupt
    assert pipe.descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pipe.descriptor)


def test_a_line_that_nobody_reads_delays_nobody() -> None:
    reading, writing = os.pipe()
    send = pipe_writer(writing)
    for _ in range(1000):
        send("x" * 200)
    os.close(writing)
    with open(reading) as received:
        lines = received.read().splitlines()
    assert 100 < len(lines) < 1000
    assert set(lines) == {"x" * 200}


def test_little_is_sent() -> None:
    messages: list[str] = []
    line = SentLine(messages.append)
    for step in range(1000):
        line.show(step, 1000, ["loss 1.0"])
    assert len(messages) < 10


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
    monkeypatch.setattr(live_line, "_display", cell.display)
    return cell


def test_a_notebook_shows_one_line_that_changes_in_its_place(cell: Cell) -> None:
    train(live_line.live_line)
    ((created, prepared, first, *_, last),) = cell.outputs
    assert (created, prepared, last) == ("", "preparing the first steps", "")
    assert first.startswith("step ")
    assert "/40 | loss " in first


def test_a_notebook_shows_the_line_of_another_process(cell: Cell) -> None:
    with LivePipe() as pipe:
        assert pipe.descriptor is not None
        pipe.receive(json.dumps({"show": [1, 2, ["step 1/2", "loss 0.5"]]}))
        pipe.close()
    assert cell.outputs == [["", "step 1/2 | loss 0.5", ""]]


def test_there_is_no_line_among_json(cell: Cell) -> None:
    with log.used("json"):
        assert live_line.live_line() is None
    assert cell.outputs == []
