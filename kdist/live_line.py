"""The live line: on a terminal, below the lines that are printed, one that tells how the run is right now.

A process whose output another one relays has no terminal: it sends what its line is to show, and the other shows it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 24
# Where there is less room, the words are worth more than the bar.
_WIDE = 110
_REFRESHES_PER_SECOND = 4
_SHOW_CURSOR = b"\x1b[?25h\n"

#: Sends to the process that has the terminal what the line of this one is to show; None where there is no such process.
relay: Callable[[str], None] | None = None


class LiveLine(Protocol):
    """Somewhere to show how the run is."""

    def prepare(self) -> None:
        """Shows that the first steps are being prepared."""

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        """Shows the columns, and a bar of how much is done, which only moves if nobody knows the last step."""

    def close(self) -> None:
        """Takes the line away."""


class TerminalLine:
    """A line on a terminal.

    Args:
        terminal: standard output if None; whatever is printed there meanwhile, by anybody, goes above the line.
    """

    def __init__(self, terminal: Console | None = None) -> None:
        self._terminal = terminal or Console(file=sys.stdout)
        self._live = Live(
            console=self._terminal,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=terminal is None,
            redirect_stderr=terminal is None,
        )
        self._live.start()

    def prepare(self) -> None:
        self._live.update(Text("preparing the first steps"), refresh=True)

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        text = Text(" | ".join(columns))
        if self._terminal.width < _WIDE:
            self._live.update(text)
            return
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(last_step or 1, step, width=_BAR_WIDTH, pulse=last_step is None), text)
        self._live.update(line)

    def close(self) -> None:
        self._live.stop()


class SentLine:
    """A line on the terminal of another process, where what `send` takes comes to a `ReceivedLine`."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._sent_at = 0.0

    def prepare(self) -> None:
        self._send(json.dumps({"prepare": []}))

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        if time.monotonic() - self._sent_at >= 1 / _REFRESHES_PER_SECOND:
            self._sent_at = time.monotonic()
            self._send(json.dumps({"show": [step, last_step, list(columns)]}))

    def close(self) -> None:
        self._send(json.dumps({"close": []}))


class ReceivedLine:
    """Shows here, on standard output, the line that another process sends."""

    def __init__(self) -> None:
        self._line: TerminalLine | None = None

    def receive(self, message: str) -> None:
        """Does what a `SentLine` sent."""
        (what, arguments) = next(iter(json.loads(message).items()))
        if what == "close":
            self.close()
            return
        self._line = self._line or TerminalLine()
        if what == "prepare":
            self._line.prepare()
        else:
            self._line.show(*arguments)

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()


def is_terminal() -> bool:
    """Whether standard output is a terminal that can show a line that changes."""
    return Console(file=sys.stdout).is_terminal


def live_line() -> LiveLine | None:
    """The line of this process; None if there is no terminal for it."""
    if relay is not None:
        return SentLine(relay)
    return TerminalLine() if is_terminal() else None


def exit_at_once(code: int) -> NoReturn:
    """Ends the process as `os._exit` does; a terminal gets back the cursor, which a live line hides."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        os.write(sys.__stdout__.fileno(), _SHOW_CURSOR)
    os._exit(code)
