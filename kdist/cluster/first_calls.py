"""Keeps the first call of a function, on each worker, apart from all other calls.

TensorFlow's chief keeps what it knows of functions on other tasks in one vector, and reads it without its lock
(`EagerClusterFunctionLibraryRuntime::Run`; read and seen in 2.21). A function that is called for the first time makes
that vector grow: a call that another thread begins in that moment reads freed memory. The worker then answers "Unable
to parse request", or the chief crashes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class FirstCalls:
    """Lets calls run side by side, but for the first one of each kind, which runs alone. Used by several threads.

    Whoever waits here waits for calls that are under way: as long as they take.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: set[tuple[Hashable, int | None]] = set()
        self._num_running = 0
        self._num_waiting_to_be_alone = 0
        self._is_one_alone = False

    @contextmanager
    def call(self, kind: Hashable, worker: int | None = None) -> Iterator[None]:
        """Surrounds a call.

        Args:
            kind: stands for the functions that it calls; None if it is never to have company.
            worker: where; None for the chief.
        """
        with self._changed:
            is_alone = kind is None or (kind, worker) not in self._known
            if is_alone:
                # Those that come meanwhile wait behind it: otherwise its turn would never come.
                self._num_waiting_to_be_alone += 1
                self._changed.wait_for(lambda: not self._num_running and not self._is_one_alone)
                self._num_waiting_to_be_alone -= 1
                self._is_one_alone = True
            else:
                self._changed.wait_for(lambda: not self._num_waiting_to_be_alone and not self._is_one_alone)
                self._num_running += 1
        has_run = False
        try:
            yield
            has_run = True
        finally:
            with self._changed:
                if is_alone:
                    self._is_one_alone = False
                else:
                    self._num_running -= 1
                if has_run:
                    self._known.add((kind, worker))
                self._changed.notify_all()

    def forget(self, worker: int) -> None:
        """Takes the next calls on a worker for first ones: it is a new process, and its functions are prepared anew."""
        with self._changed:
            self._known = {(kind, known) for kind, known in self._known if known != worker}
