"""The live line, which shows the present state of the run: on a terminal below the printed lines, or in a notebook.

A process whose output is relayed by another one has no terminal: it sends the content of its line, and the other
process shows it.
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
from typing import Any, NoReturn, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdist import forks, log

_BAR_WIDTH = 24
# On a narrower terminal, the text matters more than the bar.
_WIDE = 110
_REFRESHES_PER_SECOND = 4
_END_SECS = 5.0
_SHOW_CURSOR = b"\x1b[?25h\n"

#: Sends the content of this process's line to the process that has the terminal; None without such a process.
relay: Callable[[str], None] | None = None
_is_shown = threading.Event()


class LiveLine(Protocol):
    """A place to show the state of the run."""

    def prepare(self) -> None:
        """Shows that the first steps are being prepared."""

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        """Shows the columns and a progress bar, which only pulses if the last step is not known."""

    def close(self) -> None:
        """Removes the line."""


class TerminalLine:
    """A line on `terminal`, or on standard output, where anything printed in the meantime goes above it."""

    def __init__(self, terminal: Console | None = None) -> None:
        self._terminal = terminal or Console(file=sys.stdout)
        self._live = Live(
            console=self._terminal,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=terminal is None,
            # Output to a file has to stay there.
            redirect_stderr=terminal is None and sys.stderr.isatty(),
        )
        self._live.start()
        self._cancel = forks.undo_in_children(_print_plainly)
        _is_shown.set()

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
        self._cancel()
        _is_shown.clear()


def _print_plainly() -> None:
    """Lets this process, which has no live line, print to the files that rich stands in for."""
    sys.stdout, sys.stderr = (getattr(file, "rich_proxied_file", file) for file in (sys.stdout, sys.stderr))


class NotebookLine:
    """A line in the output of the present cell of a notebook, which stays in its place."""

    def __init__(self) -> None:
        self._handle = _display({"text/plain": ""}, raw=True, display_id=True)
        self._shown_at = 0.0

    def prepare(self) -> None:
        self._update("preparing the first steps")

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        if time.monotonic() - self._shown_at >= 1 / _REFRESHES_PER_SECOND:
            self._shown_at = time.monotonic()
            self._update(" | ".join(columns))

    def close(self) -> None:
        self._update("")

    def _update(self, text: str) -> None:
        self._handle.update({"text/plain": text}, raw=True)


class SentLine:
    """A line on the terminal of another process: what is passed to `send` reaches a `LivePipe` there."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._sent_at = 0.0

    def prepare(self) -> None:
        self._send(json.dumps({"prepare": []}))

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        if time.monotonic() - self._sent_at >= 1 / _REFRESHES_PER_SECOND:
            self._sent_at = time.monotonic()
            # A step may be a NumPy number.
            self._send(json.dumps({"show": [step, last_step, list(columns)]}, default=int))

    def close(self) -> None:
        self._send(json.dumps({"close": []}))


class LivePipe:
    """A pipe through which another process shows its line on the terminal of this one; usable while entered.

    The other process writes to `descriptor`, which is None without a terminal.
    """

    def __init__(self) -> None:
        self._reading: int | None = None
        self.descriptor: int | None = None
        if is_terminal() or is_notebook():
            self._reading, self.descriptor = os.pipe()
        self._line: LiveLine | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def show(self) -> None:
        """Shows what arrives; call it when the other process has been started."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self._thread.start()

    def receive(self, message: str) -> None:
        """Handles a message of a `SentLine`."""
        ((what, arguments),) = json.loads(message).items()
        if what == "close":
            self.close()
            return
        self._line = self._line or (NotebookLine() if is_notebook() else TerminalLine())
        if what == "prepare":
            self._line.prepare()
        else:
            self._line.show(*arguments)

    def __enter__(self) -> LivePipe:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is not None:
            # A process that the other one left behind may keep the pipe open.
            self._thread.join(_END_SECS)
            self.close()
        elif self._reading is not None and self.descriptor is not None:
            os.close(self._reading)
            os.close(self.descriptor)

    def _receive(self) -> None:
        assert self._reading is not None
        with open(self._reading) as messages, closing(self):
            for message in messages:
                self.receive(message)

    def close(self) -> None:
        """Removes the line."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


def is_terminal() -> bool:
    """Whether standard output is a terminal for people; rich alone may treat any file as one."""
    return not log.is_json() and sys.stdout.isatty() and Console(file=sys.stdout).is_terminal


def is_notebook() -> bool:
    """Whether a notebook shows the output of this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return not log.is_json() and getattr(shell, "kernel", None) is not None


def _display(*arguments: Any, **options: Any) -> Any:
    from IPython.display import display

    return display(*arguments, **options)


def live_line() -> LiveLine | None:
    """The line of this process; None without a terminal or a notebook."""
    if relay is not None:
        return SentLine(relay)
    if is_notebook():
        return NotebookLine()
    return TerminalLine() if is_terminal() else None


def pipe_writer(descriptor: int) -> Callable[[str], None]:
    """Returns a function that writes messages to a pipe, one per line, and drops a message if the pipe is full."""
    os.set_blocking(descriptor, False)
    # Children of this process would keep the pipe open.
    os.set_inheritable(descriptor, False)

    def send(message: str) -> None:
        line = message.encode() + b"\n"
        # Up to this size, a write is atomic.
        if len(line) <= select.PIPE_BUF:
            with suppress(OSError):
                os.write(descriptor, line)

    return send


def exit_at_once(code: int) -> NoReturn:
    """Ends the process as `os._exit` does, and first restores the cursor that a live line hides."""
    try:
        if _is_shown.is_set() and sys.__stdout__ is not None:
            descriptor = sys.__stdout__.fileno()
            # A halted terminal accepts nothing.
            if select.select([], [descriptor], [], 0)[1]:
                os.write(descriptor, _SHOW_CURSOR)
    finally:
        os._exit(code)
