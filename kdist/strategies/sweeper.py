"""Evicts rows of dynamic tables in a thread, while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import tensorflow as tf

from kdist.dispatch.coordinator import may_be_lost


class Sweeper:
    """Sweeps again and again, in a thread, for at most a tenth of the time.

    Args:
        sweep: lets all servers evict rows.
        start: calls a function in a thread.
        wait_for: waits for it.
    """

    #: Seconds between two sweeps, at least.
    pause_secs: ClassVar[float] = 1.0

    def __init__(
        self,
        sweep: Callable[[], Any],
        start: Callable[[Callable[[], Any]], Future[Any]],
        wait_for: Callable[[Future[Any]], Any],
    ) -> None:
        self._sweep = sweep
        self._start = start
        self._wait_for = wait_for
        self._running: Future[Any] | None = None
        self._rests_until = time.monotonic() + self.pause_secs

    @property
    def is_sweeping(self) -> bool:
        return self._running is not None and not self._running.done()

    def go_on(self) -> None:
        """Begins to sweep if it is time to; returns at once."""
        if self.is_sweeping or time.monotonic() < self._rests_until:
            return
        self.wait()
        self._running = self._start(self._timed)

    def wait(self) -> None:
        """Waits until no sweep is running, so that rows stay as they are."""
        if self._running is None:
            return
        running, self._running = self._running, None
        try:
            self._wait_for(running)
        except tf.errors.OpError as error:
            # Whoever needs a server that is lost says so.
            if not may_be_lost(error):
                raise

    def _timed(self) -> None:
        started = time.monotonic()
        self._sweep()
        now = time.monotonic()
        self._rests_until = now + max(self.pause_secs, 9 * (now - started))
