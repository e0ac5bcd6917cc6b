"""`Preparation`: when kdist has found the length of its calls, so that its rate can be measured."""

from __future__ import annotations

import kdist

# A call of another size is chosen after as many seconds as the present size took to prepare, if at all.
_TIMES_LONGER = 1.25
_FEWEST_SECS = 2.0


class Preparation:
    """Follows the runs of a session, in which calls become longer as long as it pays."""

    def __init__(self) -> None:
        self._prepared_secs = 0.0
        self._trained_secs = 0.0

    def is_over_after(self, values: kdist.hooks.RunValues) -> bool:
        """Whether, with this run, it has trained for so long that it keeps its calls."""
        if not values.warming_up:
            self._trained_secs += values.seconds
        elif self._trained_secs:
            self._prepared_secs, self._trained_secs = values.seconds, 0.0
        else:
            # Workers prepare the same size one after another.
            self._prepared_secs += values.seconds
        return self._trained_secs > _FEWEST_SECS + _TIMES_LONGER * self._prepared_secs
