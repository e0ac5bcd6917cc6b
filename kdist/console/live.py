"""The live line, which shows the present state of the run: on a terminal below the printed lines, or in a notebook."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, NoReturn, cast

from rich.console import Console
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdist import forks, log

_BAR_WIDTH = 24
# On a narrower terminal, the text matters more than the bar.
_WIDE = 110
_REFRESHES_PER_SECOND = 4
_SHOW_CURSOR = b"\x1b[?25h\n"
_PREPARING = "preparing the first steps"

_is_shown = threading.Event()


class TerminalLine:
    """A line on `terminal`, or on standard output, where anything printed in the meantime goes above it."""

    def __init__(self, terminal: Console | None = None) -> None:
        self._terminal = terminal or Console(file=cast(IO[str], log.Console.of(sys.stdout)))
        self._live = Live(
            console=self._terminal,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=terminal is None,
            # Output to a file must stay there.
            redirect_stderr=terminal is None and log.Console.of(sys.stderr).isatty(),
        )
        self._live.start()
        self._cancel = forks.undo_in_children(_print_plainly)
        _is_shown.set()

    def prepare(self) -> None:
        """Shows that the first steps are being prepared."""
        self._live.update(Text(_PREPARING), refresh=True)

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        """Shows the columns and a progress bar, which only pulses if the last step is not known."""
        text = Text(" | ".join(columns), no_wrap=True, overflow="ellipsis")
        shown: Text | Table = text
        if self._terminal.width < _WIDE:
            text.plain = re.sub(" {2,}", " ", text.plain)
        else:
            shown = Table.grid(padding=(0, 1))
            shown.add_row(ProgressBar(last_step or 1, step, width=_BAR_WIDTH, pulse=last_step is None), text)
        # A terminal shows Ctrl-C behind it; in a line of its own, the line would not be erased.
        self._live.update(Constrain(shown, self._terminal.width - len("^C^C")))

    def close(self) -> None:
        """Removes the line."""
        self._live.stop()
        self._cancel()
        _is_shown.clear()


def _print_plainly() -> None:
    """Lets this process, which has no live line, print to the files that rich stands in for."""
    sys.stdout, sys.stderr = (getattr(file, "rich_proxied_file", file) for file in (sys.stdout, sys.stderr))


class NotebookLine:
    """A line in the output of the present cell of a notebook, which stays in its place; see `TerminalLine`."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        self._shown_at = 0.0

    def prepare(self) -> None:
        self._update(_PREPARING)

    def show(self, step: int, last_step: int | None, columns: Sequence[str]) -> None:
        if time.monotonic() - self._shown_at >= 1 / _REFRESHES_PER_SECOND:
            self._shown_at = time.monotonic()
            self._update(" | ".join(columns))

    def close(self) -> None:
        self._update("")

    def _update(self, text: str) -> None:
        self._handle.update({"text/plain": text}, raw=True)


def is_terminal() -> bool:
    """Tells whether standard output is a terminal for people; rich alone may treat any file as one."""
    console: Any = log.Console.of(sys.stdout)
    return not log.is_json and console.isatty() and Console(file=console).is_terminal


def is_notebook() -> bool:
    """Tells whether a notebook shows the output of this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return not log.is_json and getattr(shell, "kernel", None) is not None


#: Shows the state of the run.
LiveLine = TerminalLine | NotebookLine


def live_line() -> LiveLine | None:
    """The line of this process; None without a terminal or a notebook."""
    if is_notebook():
        return NotebookLine()
    return TerminalLine() if is_terminal() else None


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
