"""`Calls`: the calls that wait for workers, and the workers that may take them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Call:
    function: Callable[[int], Any]
    tag: Any
    #: Whether any worker may run it.
    is_shared: bool


class Disabled(Enum):
    """The reasons why a connected worker gets no calls."""

    NO_DATA, STARTS_LATER, FAILED, LEAVES = range(4)


class Calls:
    """The calls that wait for workers, and the workers that may take them. Thread-safe.

    Attributes:
        connected: workers that TensorFlow is connected to; some of them may be disabled.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self.connected = set(workers)
        self._disabled: defaultdict[int, set[Disabled]] = defaultdict(set)
        self._shared: deque[Call] = deque()
        self._own: dict[int, deque[Call]] = {worker: deque() for worker in workers}
        self._lock = threading.RLock()
        #: The workers that wait for a call, in that order: of hundreds, a call is to wake one thread.
        self._waiting: dict[int, threading.Condition] = {}
        self._is_stopped = False
        self._began: dict[int, float] = {}

    def put(self, call: Call, worker: int | None = None, *, first: bool = False) -> None:
        with self._lock:
            calls = self._shared if worker is None else self._own[worker]
            calls.appendleft(call) if first else calls.append(call)
            if worker is None:
                self._wake_for_shared()
            else:
                self._wake(worker)

    def take(self, worker: int) -> Call | None:
        """Waits for the next call for a worker; None at the end."""
        changed = threading.Condition(self._lock)
        with self._lock:
            self._began.pop(worker, None)
            while (call := self._next_for(worker)) is None:
                # It may have been woken for a call that it may not take any more.
                self._wake_for_shared()
                if self._is_stopped or worker not in self._own:
                    return None
                self._waiting[worker] = changed
                changed.wait()
            self._began[worker] = time.monotonic()
            return call

    def _next_for(self, worker: int) -> Call | None:
        """The next call for a worker, if it may take one."""
        if self._is_stopped or not self._is_available(worker):
            return None
        calls = self._own[worker] or self._shared
        return calls.popleft() if calls else None

    def _wake(self, worker: int) -> None:
        if changed := self._waiting.pop(worker, None):
            changed.notify()

    def _wake_for_shared(self) -> None:
        """Wakes the worker that has waited longest, of those that may take calls, if a shared one is there."""
        if self._shared and (worker := next(filter(self._is_available, self._waiting), None)) is not None:
            self._wake(worker)

    @property
    def available(self) -> list[int]:
        """The workers that get calls."""
        with self._lock:
            return [worker for worker in self._own if self._is_available(worker)]

    def _is_available(self, worker: int) -> bool:
        return worker in self._own and worker in self.connected and not self._disabled.get(worker)

    def disable(self, worker: int, reason: Disabled) -> bool:
        """Gives a worker no more calls, until it is another process or `enable`; returns whether this is new."""
        with self._lock:
            is_new = reason not in self._disabled[worker]
            self._disabled[worker].add(reason)
        return is_new

    def enable(self, worker: int, reason: Disabled) -> None:
        with self._lock:
            self._disabled[worker].discard(reason)
            self._wake(worker)

    def set_active(self, workers: Collection[int]) -> None:
        """From now on gives calls to these workers only; the others finish the calls that they have started."""
        for worker in self._own:
            change = self.enable if worker in workers else self.disable
            change(worker, Disabled.STARTS_LATER)

    def remove(self, worker: int) -> list[Call]:
        """Removes a worker; returns the calls that only it could have run."""
        with self._lock:
            self.connected.discard(worker)
            own = self._own.get(worker, deque())
            calls = list(own)
            own.clear()
        return calls

    def admit(self, worker: int) -> None:
        """Gives calls to a worker that has joined, or returned."""
        with self._lock:
            self._own.setdefault(worker, deque())
            self.connected.add(worker)
            # It is another process, whose data starts over.
            self._disabled[worker] -= {Disabled.NO_DATA, Disabled.FAILED}
            self._wake(worker)

    def drop(self, worker: int) -> None:
        """Forgets a worker that has left and was removed; its thread ends."""
        with self._lock:
            self._own.pop(worker, None)
            self._disabled.pop(worker, None)
            self._wake(worker)

    def is_calling(self, worker: int) -> bool:
        """True while a worker runs a call."""
        with self._lock:
            return worker in self._began

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            for worker in [*self._waiting]:
                self._wake(worker)
        self.clear()

    def take_back(self) -> list[Call]:
        """Takes back the calls of `Coordinator.submit` that no worker has taken."""
        with self._lock:
            calls = list(self._shared)
            self._shared.clear()
        return calls

    def clear(self) -> None:
        """Drops the calls that no worker has taken."""
        with self._lock:
            self._shared.clear()
            for calls in self._own.values():
                calls.clear()

    def longest_secs(self) -> float:
        """Seconds for which the longest present call has been running."""
        with self._lock:
            return time.monotonic() - min(self._began.values(), default=time.monotonic())

    def forget_time(self) -> None:
        """Measures the duration of the present calls from now on."""
        with self._lock:
            self._began = dict.fromkeys(self._began, time.monotonic())
