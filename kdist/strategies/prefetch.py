"""Tunes `strategy.prefetch`, the steps that a worker begins before the push of a step is applied, when it is `auto`.

A worker of `parameter_server` pulls, computes and pushes. Over a slow network it waits most of the time. With a
prefetch of 1 it pulls for the next step, and computes it, while the push of the last one is on its way (after
PipeDream, Narayanan et al., 2019); every gradient is staler by one update of the same worker.
"""

from __future__ import annotations

#: A worker computes as many more gradients from the same values.
_MOST = 4
# Less is not worth the staleness.
_GAIN = 1.15
_WINDOW_SECS = 2.0


class PrefetchTuner:
    """Tries 1, 2 and 4 as long as each is faster than the one before.

    Attributes:
        prefetch: in use now.
        is_done: whether it stays.
        why: it stays.
    """

    def __init__(self) -> None:
        self.prefetch = 0
        self.is_done = False
        self.why = ""
        self._before: float | None = None
        self._secs, self._steps = 0.0, 0

    def observe(self, num_steps: int, secs: float) -> bool:
        """Learns from some steps, in which nothing was prepared.

        Args:
            num_steps: finished ones, over all workers.
            secs: the time that took.

        Returns:
            Whether `prefetch` has changed.
        """
        if self.is_done:
            return False
        self._secs, self._steps = self._secs + secs, self._steps + num_steps
        if self._secs < _WINDOW_SECS or not self._steps:
            return False
        rate = self._steps / self._secs
        self._secs, self._steps = 0.0, 0
        if self._before is not None and rate < _GAIN * self._before:
            self.prefetch //= 2
            self._end("more is not faster")
            return True
        self._before = rate
        if self.prefetch == _MOST:
            self._end("more is not tried")
            return False
        self.prefetch = 2 * self.prefetch or 1
        return True

    def _end(self, why: str) -> None:
        self.is_done, self.why = True, why
