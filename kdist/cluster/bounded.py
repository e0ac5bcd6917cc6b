"""Calls functions that may never return, in a thread that can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kdist._compat.keras_state import as_in_this_thread

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Calls `function` in a daemon thread, with Keras's settings of this one; the future gets its result or error."""
    outcome: Future[T] = Future()
    call = as_in_this_thread(function)

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by `outcome.result`
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome
