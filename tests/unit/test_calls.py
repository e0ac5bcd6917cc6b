"""How many steps a call unrolls."""

import pytest

from kdist.strategies.calls import CallSizer


def trained(sizer: CallSizer, secs: float, rate: float) -> None:
    """`secs` of training in runs of 0.1 s."""
    for _ in range(round(secs / 0.1)):
        sizer.observe(max(1, round(0.1 * rate)), 0.1, traced=False)


@pytest.mark.parametrize(("remaining", "size"), [(100, 7), (7, 7), (6, 4), (1, 1)])
def test_a_fixed_number_is_kept_but_for_what_remains(remaining: int, size: int) -> None:
    assert CallSizer(7, num_workers=4).next_size(remaining) == size


def test_sizes_are_few_and_add_up() -> None:
    sizer = CallSizer(100, num_workers=1)
    remaining, sizes = 77, []
    while remaining:
        sizes.append(sizer.next_size(remaining))
        remaining -= sizes[-1]
    assert sizes == [64, 4, 4, 4, 1]


def test_auto_grows_once_training_has_taken_as_long_as_tracing_did() -> None:
    sizer = CallSizer(None, num_workers=1)
    sizer.observe(16, 1.0, traced=True)
    trained(sizer, 0.8, rate=100)
    assert sizer.steps_per_call == 1
    trained(sizer, 0.3, rate=100)
    assert sizer.steps_per_call == 4


def test_auto_keeps_calls_of_slow_models_short() -> None:
    sizer = CallSizer(None, num_workers=2)
    sizer.observe(1, 0.1, traced=True)
    trained(sizer, 60, rate=10)
    assert sizer.steps_per_call == 1


def test_auto_gives_every_worker_its_share_near_the_end() -> None:
    sizer = CallSizer(None, num_workers=4)
    for _ in range(2):
        sizer.observe(16, 0.05, traced=True)
        trained(sizer, 0.1, rate=2000)
    assert [sizer.next_size(remaining) for remaining in (100, 60, 16, 4)] == [16, 4, 4, 1]


def test_auto_goes_by_the_time_that_steps_take_and_not_by_when_they_were_asked_for() -> None:
    sizer = CallSizer(None, num_workers=1)
    sizer.observe(1, 1.0, traced=True)
    # Steps of 0.3 s, of which ten arrive at once.
    for _ in range(20):
        sizer.observe(0, 2.999, traced=False)
        sizer.observe(10, 0.001, traced=False)
    assert sizer.steps_per_call == 1
