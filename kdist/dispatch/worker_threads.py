"""A thread for each worker, which makes its calls, and the queues of calls that wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kdist._compat.tensorflow import QuietExecutor, executor_scope
from kdist.cluster.spec import Task
from kdist.dispatch.connection import compute_device

#: TensorFlow's errors when a task is lost, when another one has its address, and when it dropped a call of a lost one.
OUT_OF_REACH = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
# Parts of the messages of errors that may have other causes: a new process at an old address does not know what the old
# one knew, and a task that was removed no longer has a client.
_OF_A_LOST_PROCESS = ("remote_handle", "unknown device", "context_id", "Unable to find a context", "Client for target")


class CallsCancelled(Exception):
    """Calls in flight took too long after an interruption and were discarded."""


@dataclass(frozen=True)
class Finished:
    """A call that has finished.

    Attributes:
        worker: index of the worker that ran it.
        tag: given by its caller.
        outcome: its return value or error.
    """

    worker: int
    tag: Any
    outcome: Future[Any]

    @property
    def is_lost(self) -> bool:
        """True if it failed because its worker is lost."""
        return may_be_lost(self.outcome.exception())


@dataclass(frozen=True)
class Call:
    function: Callable[[int], Any]
    tag: Any
    #: Whether any worker may run it.
    is_shared: bool


class Calls:
    """The calls that wait for workers, and the workers that may take them. Thread-safe.

    Attributes:
        available: workers that accept calls.
        connected: workers that TensorFlow is connected to; some of them may be disabled.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self.available = set(workers)
        self.connected = set(workers)
        self._shared: deque[Call] = deque()
        self._own: dict[int, deque[Call]] = {worker: deque() for worker in workers}
        self._changed = threading.Condition()
        self._is_stopped = False
        self._began: dict[int, float] = {}

    def put(self, call: Call, worker: int | None = None, *, first: bool = False) -> None:
        with self._changed:
            calls = self._shared if worker is None else self._own[worker]
            calls.appendleft(call) if first else calls.append(call)
            self._changed.notify_all()

    def take(self, worker: int) -> Call | None:
        """Waits for the next call for a worker; None at the end."""
        with self._changed:
            self._began.pop(worker, None)
            while not self._is_stopped:
                if worker in self.available and (calls := self._own[worker] or self._shared):
                    self._began[worker] = time.monotonic()
                    return calls.popleft()
                self._changed.wait()
        return None

    def disable(self, worker: int) -> None:
        """Gives a worker no more calls."""
        with self._changed:
            self.available.discard(worker)

    def remove(self, worker: int) -> list[Call]:
        """Removes a worker; returns the calls that only it could have run."""
        with self._changed:
            self.available.discard(worker)
            self.connected.discard(worker)
            calls = list(self._own[worker])
            self._own[worker].clear()
        return calls

    def admit(self, worker: int) -> None:
        with self._changed:
            self.available.add(worker)
            self.connected.add(worker)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self.clear()

    def take_back(self) -> list[Call]:
        """Takes back the calls that any worker could have run, and that none has taken."""
        with self._changed:
            calls = list(self._shared)
            self._shared.clear()
        return calls

    def clear(self) -> None:
        """Drops the calls that no worker has taken."""
        with self._changed:
            self._shared.clear()
            for calls in self._own.values():
                calls.clear()

    def longest_secs(self) -> float:
        """Seconds for which the longest present call has been running."""
        with self._changed:
            return time.monotonic() - min(self._began.values(), default=time.monotonic())

    def forget_time(self) -> None:
        """Measures the duration of the present calls from now on."""
        with self._changed:
            self._began = dict.fromkeys(self._began, time.monotonic())


class WorkerThread:
    """A thread that makes the calls for one worker, one after the other.

    It may be left behind in a call that never returns, and then ends with the process.
    """

    def __init__(self, worker: int, calls: Calls, finished: queue.SimpleQueue[tuple[Call, Finished]]) -> None:
        self._worker = worker
        self._calls = calls
        self._finished = finished
        threading.Thread(target=self._work, daemon=True, name=f"kdist-worker-{worker}").start()

    def _work(self) -> None:
        executor = QuietExecutor()
        device = compute_device(Task("worker", self._worker))
        while call := self._calls.take(self._worker):
            outcome: Future[Any] = Future()
            try:
                with tf.device(device), executor_scope(executor):
                    outcome.set_result(call.function(self._worker))
            except BaseException as error:  # noqa: BLE001 - whoever takes the outcome raises it
                if may_be_lost(error):
                    self._calls.disable(self._worker)
                outcome.set_exception(error)
            self._finished.put((call, Finished(self._worker, call.tag, outcome)))
            # Handles to objects on the tasks must not survive in this frame.
            del call, outcome


def next_in(finished: queue.SimpleQueue[tuple[Call, Finished]], timeout: float) -> tuple[Call, Finished] | None:
    """The next call that has finished; None if none does within `timeout` seconds."""
    with suppress(queue.Empty):
        return finished.get(timeout=timeout)
    return None


def may_be_lost(error: BaseException | None) -> bool:
    """Returns true if an error of a call may mean that its worker is lost, or was replaced by another process."""
    if isinstance(error, OUT_OF_REACH):
        return True
    return isinstance(error, tf.errors.OpError) and any(sign in error.message for sign in _OF_A_LOST_PROCESS)
