import warnings

from kdist.console.warn import warn


def test_what_happens_twice_is_said_twice() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            warn("worker:1 is lost")
    assert [str(warning.message) for warning in said] == ["kdist: worker:1 is lost"] * 2
