"""Calls functions that may never return in threads that can be left behind."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kdist._compat.keras_state import as_in_this_thread

T = TypeVar("T")

#: The queues of idle threads, from which each takes its next call. Threads are kept: TensorFlow never frees its record
#: of a thread, some 400 bytes, and a step may be such a call.
_idle: deque[queue.SimpleQueue[Callable[[], None]]] = deque()
# The threads are not forked along.
os.register_at_fork(after_in_child=_idle.clear)


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Calls `function` in a daemon thread, with Keras's settings of this one; the future gets its result or error."""
    outcome: Future[T] = Future()
    call = as_in_this_thread(function)

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `outcome.result`
            outcome.set_exception(error)

    try:
        calls = _idle.pop()
    except IndexError:
        calls = queue.SimpleQueue()
        threading.Thread(target=_work, args=[calls], daemon=True).start()
    calls.put(work)
    return outcome


def _work(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        work = calls.get()
        work()
        # Handles to objects on the tasks must not survive in this frame.
        del work
        _idle.append(calls)
