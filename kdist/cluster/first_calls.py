"""Keeps the first call of a function that the chief runs apart from all its other calls.

TensorFlow's chief keeps what it knows of functions on other tasks in one vector, and reads it without its lock
(`EagerClusterFunctionLibraryRuntime::Run`; read and seen in 2.21). A function that is called for the first time makes
that vector grow: a call that another thread begins in that moment reads freed memory. A task then answers "Unable to
parse request", or the chief crashes. Fetching a tensor from a task is such a call; what a worker is told to run by
itself is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

# By then nearly every call has begun all that it consists of, and only waits: for a task that is slow, or stopped. To
# wait longer would hold everybody up for it.
_BEGUN_SECS = 5.0


class FirstCalls:
    """Lets calls run side by side, but for the first one of each kind, which begins alone. Used by several threads.

    Nobody waits here longer than a few seconds for one call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: set[Hashable] = set()
        #: How often all was forgotten; what a call did before that counts no more.
        self._generation = 0
        #: When the calls began that are under way, those that are alone and the others.
        self._alone: dict[object, float] = {}
        self._others: dict[object, float] = {}
        self._num_waiting_to_be_alone = 0
        self._of_thread = threading.local()

    @contextmanager
    def call(self, kind: Hashable) -> Iterator[None]:
        """Surrounds a call; inside another one it has no effect.

        Args:
            kind: stands for the functions that are called; None if that is never known.
        """
        if getattr(self._of_thread, "is_calling", False):
            yield
            return
        own = object()
        with self._changed:
            is_first = kind is None or kind not in self._known
            if is_first:
                # Those that come meanwhile wait behind it: otherwise its turn would never come.
                self._num_waiting_to_be_alone += 1
                try:
                    self._wait_for_calls(self._alone, self._others)
                finally:
                    self._num_waiting_to_be_alone -= 1
                self._alone[own] = time.monotonic()
            else:
                self._changed.wait_for(lambda: not self._num_waiting_to_be_alone)
                self._wait_for_calls(self._alone)
                self._others[own] = time.monotonic()
            generation = self._generation
            self._changed.notify_all()
        self._of_thread.is_calling = True
        has_run = False
        try:
            yield
            has_run = True
        finally:
            self._of_thread.is_calling = False
            with self._changed:
                self._alone.pop(own, None)
                self._others.pop(own, None)
                if has_run and generation == self._generation:
                    self._known.add(kind)
                self._changed.notify_all()

    def forget(self) -> None:
        """Takes the next call of every kind for the first one: a task is another process than it was."""
        with self._changed:
            self._known.clear()
            self._generation += 1

    def _wait_for_calls(self, *of_kinds: dict[object, float]) -> None:
        """Waits until calls have ended, or begun all that they consist of."""
        while True:
            now = time.monotonic()
            left = [began + _BEGUN_SECS - now for calls in of_kinds for began in calls.values()]
            if max(left, default=0.0) <= 0:
                return
            self._changed.wait(max(left))


#: TensorFlow has one such vector in a process.
first_calls = FirstCalls()
