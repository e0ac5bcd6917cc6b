"""`RunLength`: how many steps a session runs before it calls its hooks."""

from __future__ import annotations

from collections.abc import Iterable

from kdist.run.statistics import RunValues

# A run takes at most this long, for hooks that act by the clock.
_LONGEST_SECS = 1.0
_FIRST_STEPS = 16
_GROWTH = 4


class RunLength:
    """Lets a run be as long as the hooks allow, and not much longer than a second."""

    def __init__(self) -> None:
        self._longest = _FIRST_STEPS

    def fewest(self, steps: Iterable[int | None], *, after: int = 0) -> int:
        """The fewest steps that all hooks allow, None being any number, and at most a run's length after `after`."""
        return min([after + self._longest, *(each for each in steps if each is not None)])

    def observe(self, values: RunValues) -> None:
        """Learns from a run how long its steps take."""
        if not values.warming_up and values.seconds > 0:
            in_time = max(1, int(values.num_steps / values.seconds * _LONGEST_SECS))
            # Steps may have been done before they were requested: a single run says little.
            self._longest = min(in_time, _GROWTH * self._longest)
