"""Which workers get calls, without any process."""

from __future__ import annotations

from kdist.dispatch.coordinator import Calls, Disabled


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
