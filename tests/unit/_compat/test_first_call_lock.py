"""The first call of each kind begins alone, and whoever is after it waits for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kdist._compat.first_call_lock import FirstCalls

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

    def begin(self, name: str, kind: Any, error: Exception | None = None) -> None:
        self._may_end[name] = threading.Event()

        def call() -> None:
            with self._first_calls.call(kind):
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

    def know(self, kind: Any) -> None:
        """Has the first call of a kind behind it."""
        with self._first_calls.call(kind):
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
    threads.know("fetch")
    threads.know("read")
    threads.begin("a", "fetch")
    threads.begin("b", "read")
    threads.begin("c", "fetch")
    assert threads.are_running("a", "b", "c")
    for name in ("a", "b", "c"):
        threads.end(name)


@pytest.mark.parametrize("kind", ["read", None])
def test_what_is_new_waits_for_what_is_under_way(kind: Any, threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("fetch")
    threads.know(None)
    threads.begin("old", "fetch")
    assert threads.are_running("old")
    threads.begin("new", kind)
    assert is_waited_for(first_calls)
    assert threads.running == ["old"]
    threads.end("old")
    assert threads.are_running("new")
    threads.end("new")


def test_those_that_come_later_wait_behind_a_first_call(threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("fetch")
    threads.begin("old", "fetch")
    assert threads.are_running("old")
    threads.begin("new", "read")
    assert is_waited_for(first_calls)
    threads.begin("later", "fetch")
    threads.end("old")
    assert threads.are_running("new")
    threads.end("new")
    assert threads.are_running("later")
    threads.end("later")


def test_a_kind_that_failed_is_still_new(threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("fetch")
    threads.begin("fails", "read", ValueError("no"))
    assert threads.are_running("fails")
    threads.end("fails")
    threads.begin("old", "fetch")
    assert threads.are_running("old")
    threads.begin("again", "read")
    assert is_waited_for(first_calls)
    assert threads.running == ["old"]
    threads.end("old")
    assert threads.are_running("again")
    threads.end("again")


def test_after_a_task_is_another_process_all_calls_are_first_ones(threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("fetch")
    threads.know("read")
    threads.begin("old", "fetch")
    assert threads.are_running("old")
    first_calls.forget()
    threads.begin("new", "read")
    assert is_waited_for(first_calls)
    assert threads.running == ["old"]
    threads.end("old")
    assert threads.are_running("new")
    threads.end("new")


def test_what_was_forgotten_while_it_ran_is_still_new(threads: Threads, first_calls: FirstCalls) -> None:
    threads.know("read")
    threads.begin("old", "read")
    assert threads.are_running("old")
    first_calls.forget()
    threads.end("old")
    threads.begin("new", "read")
    assert threads.are_running("new")
    threads.begin("other", "read")
    assert is_waited_for(first_calls)
    threads.end("new")
    assert threads.are_running("other")
    threads.end("other")


@pytest.mark.parametrize("first", ["fetch", "read"])
def test_nobody_waits_long_for_a_call_that_never_ends(
    first: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdist._compat.first_call_lock._BEGUN_SECS", 0.05)
    threads.know("fetch")
    threads.begin("hangs", first)
    assert threads.are_running("hangs")
    threads.begin("new", "write")
    assert threads.are_running("hangs", "new")
    threads.begin("old", "fetch")
    assert threads.are_running("hangs", "new", "old")
    for name in ("hangs", "new", "old"):
        threads.end(name)


def test_a_call_inside_another_one_does_not_wait_for_it(first_calls: FirstCalls) -> None:
    with first_calls.call(None), first_calls.call("fetch"), first_calls.call(None):
        pass
    with first_calls.call("read"):
        pass
