"""The workers that get calls, without any process."""

from __future__ import annotations

import queue
import threading

import pytest

from kdist.dispatch.call_queue import Call, Calls, Disabled


def test_a_worker_gets_calls_when_no_reason_against_it_is_left() -> None:
    calls = Calls([0, 1])
    calls.set_active([0])
    # A call that it had started before has failed, and it is connected.
    calls.disable(1, Disabled.FAILED)
    calls.enable(1, Disabled.FAILED)
    assert calls.available == [0]
    calls.set_active([0, 1])
    assert calls.available == [0, 1]
    assert calls.disable(1, Disabled.NO_DATA)
    assert not calls.disable(1, Disabled.NO_DATA)
    calls.disable(1, Disabled.FAILED)
    calls.enable(1, Disabled.FAILED)
    assert calls.available == [0]
    calls.enable(1, Disabled.NO_DATA)
    assert calls.available == [0, 1]


def test_a_worker_that_is_another_process_has_all_of_its_data_again() -> None:
    calls = Calls([0, 1])
    calls.disable(1, Disabled.NO_DATA)
    calls.remove(1)
    # The failure of its call is noticed later.
    calls.disable(1, Disabled.FAILED)
    assert calls.available == [0]
    calls.admit(1)
    assert calls.available == [0, 1]


def test_a_worker_that_starts_later_does_so_if_it_is_another_process_by_then() -> None:
    calls = Calls([0, 1])
    calls.set_active([0])
    calls.remove(1)
    calls.admit(1)
    assert calls.available == [0]
    calls.set_active([0, 1])
    assert calls.available == [0, 1]


class _CountedLooks(Calls):
    """Counts how often a worker looks for a call, and tells when all of them wait."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(range(num_workers))
        self.num_looks = 0
        self.looked = threading.Semaphore(0)

    def _next_for(self, worker: int) -> Call | None:
        self.num_looks += 1
        self.looked.release()
        return super()._next_for(worker)


def test_a_call_wakes_one_worker() -> None:
    calls, taken = _CountedLooks(20), queue.SimpleQueue[int]()

    def work(worker: int) -> None:
        while calls.take(worker):
            taken.put(worker)

    threads = [threading.Thread(target=work, args=[worker], daemon=True) for worker in range(20)]
    for thread in threads:
        thread.start()
        calls.looked.acquire(timeout=10)
    by = []
    for _ in range(40):
        calls.put(Call(lambda worker: worker, None, is_shared=True))
        by.append(taken.get(timeout=10))
        # That which has taken it looks for the next one.
        for _ in range(2):
            calls.looked.acquire(timeout=10)
    # As many have looked as at the beginning, and two for each call; the one that waits longest is the next.
    assert calls.num_looks == 20 + 2 * 40
    assert by == [*range(20)] * 2
    calls.put(Call(lambda worker: worker, None, is_shared=False), worker=7)
    assert taken.get(timeout=10) == 7
    calls.stop()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_worker_that_may_not_take_the_call_it_woke_for_leaves_it_to_another_one(leaves: bool) -> None:
    calls = _CountedLooks(2)
    taken = queue.SimpleQueue[int]()

    def work(worker: int) -> None:
        if calls.take(worker):
            taken.put(worker)

    for worker in range(2):
        threading.Thread(target=work, args=[worker], daemon=True).start()
        calls.looked.acquire(timeout=10)
    # Nobody sees the call before that happens to the worker that it wakes.
    with calls._lock:
        calls.put(Call(lambda worker: worker, None, is_shared=True))
        if leaves:
            calls.remove(0)
            calls.drop(0)
        else:
            calls.disable(0, Disabled.FAILED)
    assert taken.get(timeout=10) == 1
