"""The first call of each kind runs alone, and whoever is after it waits for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kdist.cluster.first_calls import FirstCalls

_LONG_SECS = 20.0


class Threads:
    """Calls in threads of their own, each of which goes on until it is let go.

    Attributes:
        running: names of the calls that are under way, in the order of their beginning.
    """

    def __init__(self, first_calls: FirstCalls) -> None:
        self._first_calls = first_calls
        self._pool = ThreadPoolExecutor(16)
        self._may_end: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self._futures: dict[str, Future[None]] = {}
        self.running: list[str] = []

    def begin(self, name: str, kind: Any, worker: int | None = None, error: Exception | None = None) -> None:
        self._may_end[name] = threading.Event()

        def call() -> None:
            with self._first_calls.call(kind, worker):
                self._change(lambda: self.running.append(name))
                assert self._may_end[name].wait(_LONG_SECS)
                self._change(lambda: self.running.remove(name))
                if error:
                    raise error

        self._futures[name] = self._pool.submit(call)

    def end(self, name: str) -> None:
        self._may_end[name].set()
        self._futures[name].exception(_LONG_SECS)

    def are_running(self, *names: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: sorted(self.running) == sorted(names), _LONG_SECS)

    def _change(self, change: Callable[[], Any]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def know(self, kind: Any, worker: int | None = None) -> None:
        """Has the first call of a kind behind it."""
        with self._first_calls.call(kind, worker):
            pass


@pytest.fixture
def first_calls() -> FirstCalls:
    return FirstCalls()


@pytest.fixture
def threads(first_calls: FirstCalls) -> Threads:
    return Threads(first_calls)


def is_waited_for(first_calls: FirstCalls) -> bool:
    """Waits until a call waits to be alone."""
    with first_calls._changed:
        return first_calls._changed.wait_for(lambda: first_calls._num_waiting_to_be_alone > 0, _LONG_SECS)


def test_known_kinds_run_side_by_side(threads: Threads) -> None:
    threads.know("step", 0)
    threads.know("step", 1)
    threads.begin("a", "step", 0)
    threads.begin("b", "step", 1)
    assert threads.are_running("a", "b")
    threads.end("a")
    threads.end("b")


@pytest.mark.parametrize(("kind", "worker"), [("other", 0), ("step", 1), ("step", None), (None, None)])
def test_what_is_new_waits_for_what_is_under_way(
    kind: Any, worker: int | None, threads: Threads, first_calls: FirstCalls
) -> None:
    threads.know("step", 0)
    threads.begin("old", "step", 0)
    assert threads.are_running("old")
    threads.begin("new", kind, worker)
    assert is_waited_for(first_calls)
    assert threads.running == ["old"]
    threads.end("old")
    assert threads.are_running("new")
    threads.end("new")


def test_those_that_come_later_wait_behind_a_first_call(threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("step", 0)
    threads.begin("old", "step", 0)
    assert threads.are_running("old")
    threads.begin("new", "other", 0)
    assert is_waited_for(first_calls)
    threads.begin("later", "step", 0)
    threads.end("old")
    assert threads.are_running("new")
    threads.end("new")
    assert threads.are_running("later")
    threads.end("later")


def test_a_kind_that_failed_is_still_new(threads: Threads) -> None:
    threads.know("step", 0)
    threads.begin("fails", "other", 0, ValueError("no"))
    assert threads.are_running("fails")
    threads.end("fails")
    threads.begin("again", "other", 0)
    assert threads.are_running("again")
    threads.begin("old", "step", 0)
    assert threads.running == ["again"]
    threads.end("again")
    threads.end("old")


def test_a_worker_that_is_a_new_process_has_first_calls_again(threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("step", 0)
    threads.know("step", 1)
    first_calls.forget(1)
    threads.begin("known", "step", 0)
    assert threads.are_running("known")
    threads.begin("new", "step", 1)
    assert is_waited_for(first_calls)
    assert threads.running == ["known"]
    threads.end("known")
    assert threads.are_running("new")
    threads.end("new")
