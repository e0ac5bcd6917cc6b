"""When a hook acts: every so many steps or seconds. After `tf.compat.v1.train.SecondOrStepTimer`."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist.errors import ConfigError


class Timer:
    """Says when something is due: at multiples of `every_steps`, or `every_secs` after the last time.

    TF1's timer counted from the last trigger; multiples give the same steps for a run that starts at 0, and let hooks
    share the boundaries that the session has to stop at, also after a resume from an odd step.

    Args:
        every_steps: act at global steps divisible by this; at least 1.
        every_secs: act when this many seconds passed; more than 0.
        owner: named in errors, as `hooks.checkpoint`.
        clock: seconds from any start; a test's own.

    Raises:
        ConfigError: neither or both are given, or one is out of range.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_secs: float | None = None,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every_steps is None) == (every_secs is None):
            raise ConfigError(
                f"{owner}: give exactly one of every_steps and every_secs (every_steps={every_steps}, "
                f"every_secs={every_secs}); set the other one to null"
            )
        if every_steps is not None and every_steps < 1:
            raise ConfigError(f"{owner}.every_steps={every_steps}: must be at least 1")
        if every_secs is not None and every_secs <= 0:
            raise ConfigError(f"{owner}.every_secs={every_secs}: must be more than 0")
        self._every_steps = every_steps
        self._every_secs = every_secs
        self._clock = clock
        self._last_step = 0
        self._last_time = clock()

    def start(self, step: int) -> None:
        """Starts at `step` now."""
        self._last_step = step
        self._last_time = self._clock()

    def due(self, step: int) -> bool:
        """Whether to act at `step`: a multiple, or the time, was reached since the last time."""
        if self._every_steps is not None:
            return step // self._every_steps > self._last_step // self._every_steps
        return self._every_secs is not None and self._clock() - self._last_time >= self._every_secs

    def acted(self, step: int) -> None:
        """Notes that it was done at `step`, now."""
        self.start(step)

    def due_in(self, step: int) -> int | None:
        """Steps from `step` to the next multiple; None if seconds decide."""
        return None if self._every_steps is None else self._every_steps - step % self._every_steps
