"""`Progress`: on a terminal, one line that tells how the run is right now."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kdist import console
from kdist.hooks.base import Hook, RunContext, RunValues

if TYPE_CHECKING:
    from kdist.session import TrainSession

_BAR_WIDTH = 24
_REFRESHES_PER_SECOND = 4


class Progress(Hook):
    """Shows step, rate, time left, loss and metrics, staleness and restarts, below the lines that are printed.

    Where standard output is no terminal it shows nothing. `fit(verbose=1)` and `run.verbose=1` bring it along.

    Args:
        terminal: what it writes to; standard output if None.
    """

    def __init__(self, terminal: Console | None = None) -> None:
        self._terminal = terminal
        self._live: Live | None = None

    def after_create_session(self, session: TrainSession) -> None:
        if self._live is None:
            terminal = self._terminal or Console(file=sys.stdout)
            if not terminal.is_terminal:
                return
            # Whatever is printed meanwhile, by anybody, goes above the line.
            self._live = Live(
                console=terminal,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=self._terminal is None,
                redirect_stderr=self._terminal is None,
            )
            self._live.start()
        self._live.update(Text("preparing the first steps"))

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._live is not None:
            self._live.update(_line(context.session, values))

    def end(self, session: TrainSession) -> None:
        self.close()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def idle_in(self, step: int) -> int | None:
        return None


def _line(session: TrainSession, values: RunValues) -> Table:
    rate = values.num_steps / values.seconds if values.seconds and not values.warming_up else None
    columns = console.train_columns(values.global_step, session.last_step, values.totals.logs, rate)
    if session.is_asynchronous:
        columns.append(f"staleness {np.mean(values.staleness):.1f}")
    columns += [f"{what} restarts {count}" for what, count in session.restarts.items() if count]
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(session.last_step or 1, values.global_step, width=_BAR_WIDTH, pulse=session.last_step is None)
    line.add_row(bar, Text(" | ".join(columns), no_wrap=True, overflow="ellipsis"))
    return line
