"""Keeps the chief's first call of each function apart from all its other calls.

TensorFlow's chief records the functions on other tasks in one vector, and reads it without its lock
(`EagerClusterFunctionLibraryRuntime::Run`; read and seen in 2.21). The first call of a function makes that vector grow:
a call that another thread starts at that moment reads freed memory. A task then answers "Unable to parse request", or
the chief crashes. Fetching a tensor from a task is such a call; a worker's own calls are not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from kdist._compat.tensorflow import QuietExecutor, executor_scope

T = TypeVar("T")

# By then nearly every call has started all of its parts and only waits for a task that is slow, or stopped. Waiting
# longer would block all other calls.
_BEGUN_SECS = 5.0


class FirstCalls:
    """Lets calls run in parallel, except the first one of each kind, which starts alone. Thread-safe.

    No caller waits longer than a few seconds for one call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._known: set[Hashable] = set()
        #: How often `forget` was called; calls from before no longer count.
        self._generation = 0
        #: Start times of the present calls: of calls that run alone, and of the others.
        self._alone: dict[object, float] = {}
        self._others: dict[object, float] = {}
        self._num_waiting_to_be_alone = 0
        self._of_thread = threading.local()

    @contextmanager
    def call(self, kind: Hashable) -> Iterator[None]:
        """Encloses a call of functions that `kind` identifies (None: unknown); has no effect inside another call."""
        if getattr(self._of_thread, "is_calling", False):
            yield
            return
        own = object()
        with self._changed:
            is_first = kind is None or kind not in self._known
            if is_first:
                # Later calls wait behind it: otherwise its turn would never come.
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
        """Treats the next call of every kind as the first one: a task was replaced by another process."""
        with self._changed:
            self._known.clear()
            self._generation += 1

    def _wait_for_calls(self, *of_kinds: dict[object, float]) -> None:
        """Waits until calls have finished, or started all of their parts."""
        while True:
            now = time.monotonic()
            left = [began + _BEGUN_SECS - now for calls in of_kinds for began in calls.values()]
            if max(left, default=0.0) <= 0:
                return
            self._changed.wait(max(left))


#: TensorFlow has one such vector in a process.
first_calls = FirstCalls()


def fetch(tensor: tf.Tensor) -> Any:
    """The value of a tensor of some task; the copy is an op, which lets other threads run meanwhile."""
    in_turn = first_calls.call(("fetch", tensor.device, tensor.dtype))
    # Of this process, whatever its job is called, and not of the task that a scope further out has chosen.
    with in_turn, tf.device(None), tf.device("CPU:0"):
        return tf.identity(tensor).numpy()


def call_in_turn(function: Callable[[], T], kind: Hashable) -> T:
    """Calls a function that calls tasks, from any thread; `kind` as in `FirstCalls.call`."""
    with first_calls.call(kind), executor_scope(QuietExecutor()):
        return function()
