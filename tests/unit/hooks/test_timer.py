import pytest
from fakes import FakeClock

from kdist.errors import ConfigError
from kdist.hooks import SecondOrStepTimer


def test_steps_are_due_at_multiples_from_any_start() -> None:
    timer = SecondOrStepTimer(every_steps=10, owner="x")
    timer.restart(13)
    assert [timer.due(step) for step in (13, 19, 20, 27)] == [False, False, True, True]
    timer.restart(20)
    assert not timer.due(29)
    assert timer.due(30)
    assert [timer.due_in(step) for step in (20, 21, 29)] == [10, 9, 1]


def test_seconds_are_due_after_the_last_time() -> None:
    clock = FakeClock()
    timer = SecondOrStepTimer(every_secs=5, owner="x", clock=clock)
    assert not timer.due(1)
    clock.now = 5
    assert timer.due(1)
    timer.restart(1)
    assert not timer.due(2)
    assert timer.due_in(2) is None


def test_with_both_whichever_comes_first() -> None:
    clock = FakeClock()
    timer = SecondOrStepTimer(every_steps=10, every_secs=5, owner="x", clock=clock)
    assert not timer.due(9)
    assert timer.due(10)
    clock.now = 6
    assert timer.due(3)


@pytest.mark.parametrize("arguments", [{}, {"every_steps": 0}, {"every_secs": 0}, {"every_secs": -1.0}])
def test_wrong_frequency_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"^hooks\.mine"):
        SecondOrStepTimer(**arguments, owner="hooks.mine")
