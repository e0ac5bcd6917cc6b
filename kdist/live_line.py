"""The live line: on a terminal, below the lines that are printed, one that tells how the run is right now.

A process whose output another one relays has no terminal: it sends what its line is to show, and the other shows it.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
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
_END_SECS = 5.0
_SHOW_CURSOR = b"\x1b[?25h\n"

#: Sends to the process that has the terminal what the line of this one is to show; None where there is no such process.
relay: Callable[[str], None] | None = None
_is_shown = False


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
            # What goes to a file is to stay there.
            redirect_stderr=terminal is None and sys.stderr.isatty(),
        )
        self._live.start()
        _remember(is_shown=True)

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
        _remember(is_shown=False)


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
            # A step may be a number of NumPy's.
            self._send(json.dumps({"show": [step, last_step, list(columns)]}, default=int))

    def close(self) -> None:
        self._send(json.dumps({"close": []}))


class ReceivedLine:
    """Shows on this process's terminal the line that another process sends."""

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


class LivePipe:
    """A pipe by which another process sends its line to the terminal of this one; while entered, it may be shown.

    Attributes:
        descriptor: of the end that the other process writes to; None if there is no terminal here.
    """

    def __init__(self) -> None:
        self._reading: int | None = None
        self.descriptor: int | None = None
        if is_terminal():
            self._reading, self.descriptor = os.pipe()
        self._line = ReceivedLine()
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def show(self) -> None:
        """Shows what comes; the other process has been started."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self._thread.start()

    def __enter__(self) -> LivePipe:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            # Something that the other process left behind may keep the pipe open.
            self._thread.join(_END_SECS)
            self._line.close()
            return
        for end in (self._reading, self.descriptor):
            if end is not None:
                os.close(end)

    def _receive(self) -> None:
        assert self._reading is not None
        with open(self._reading) as messages, closing(self._line):
            for message in messages:
                self._line.receive(message)


def is_terminal() -> bool:
    """Whether standard output is a terminal that can show a line that changes.

    To ask it is not enough: some variables of the environment have rich take any file for a terminal.
    """
    return sys.stdout.isatty() and Console(file=sys.stdout).is_terminal


def live_line() -> LiveLine | None:
    """The line of this process; None if there is no terminal for it."""
    if relay is not None:
        return SentLine(relay)
    return TerminalLine() if is_terminal() else None


def pipe_writer(descriptor: int) -> Callable[[str], None]:
    """Writes a line for each message to a pipe; one for which there is no room is left out."""
    os.set_blocking(descriptor, False)
    # What this process starts would keep the pipe open.
    os.set_inheritable(descriptor, False)

    def send(message: str) -> None:
        line = message.encode() + b"\n"
        # So much is written at once, or not at all.
        if len(line) <= select.PIPE_BUF:
            with suppress(OSError):
                os.write(descriptor, line)

    return send


def exit_at_once(code: int) -> NoReturn:
    """Ends the process as `os._exit` does; a terminal gets back the cursor, which a live line hides."""
    try:
        if _is_shown and sys.__stdout__ is not None:
            descriptor = sys.__stdout__.fileno()
            # A terminal that was halted takes nothing.
            if select.select([], [descriptor], [], 0)[1]:
                os.write(descriptor, _SHOW_CURSOR)
    finally:
        os._exit(code)


def _remember(*, is_shown: bool) -> None:
    global _is_shown  # noqa: PLW0603 - there is one terminal
    _is_shown = is_shown
