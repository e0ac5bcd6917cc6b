"""`PrefetchSearch`: the number of steps in a call, and of those that are begun ahead, found together."""

from __future__ import annotations

from kdist.strategies.call_sizer import GROWTH, CallSizer

#: A worker computes as many more gradients from the same values.
_PREFETCHES = (1, 2, 4)
# Less is not worth the staleness.
_GAIN = 1.15
#: Rates that differ by less are the same.
_SAME = 1.05
#: Single steps, and calls that are tried, show how long they take in so many seconds.
_SINGLE_SECS, _TRIAL_SECS = 0.25, 1.0
#: Numbers of steps that `auto` chooses from: few, as for each that is left at the end other calls are prepared.
_SIZES = (4, 16, 64)
#: A step waits for the network at most for the time of as many empty calls.
_STEP_WAITS = 2


class PrefetchSearch(CallSizer):
    """Decides how many steps the next call unrolls, and `strategy.prefetch`, where workers wait for the network.

    A worker pulls, computes and pushes. Over a slow network it waits most of the time. With a prefetch of 1 it pulls
    for the next step, and computes it, while the push of the last one is on its way (after PipeDream, Narayanan et al.,
    2019); every gradient is staler by one update of the same worker.

    The search goes by a model of the cost: a call of n steps takes the time of a call that does nothing, that of its
    first step, and for each other step the time of a step divided by those that overlap, until the arithmetic is what
    limits. Preparing a call takes what does not depend on n, and what is in proportion to the time of its trace. Single
    steps give these times. Calls of the number of steps that pays most in what is left to train are tried with the
    largest prefetch that a step may need: if they are not faster than the model says of calls without, none stays; if
    the arithmetic limits them, a smaller prefetch is as fast. So calls are prepared three times at most.

    Args:
        steps_per_call: a fixed number of steps, or None for `auto`.
        num_workers: workers that share the steps.
        last_step: the global step that training is to end at; None if nobody knows.
        prepare_secs: see `CallSizer`.
        empty_call_secs: what a call takes in which a worker does nothing.

    Attributes:
        prefetch: in use now.
        why: it stays; empty while it may change.
    """

    def __init__(
        self,
        steps_per_call: int | None,
        num_workers: int,
        last_step: int | None,
        prepare_secs: float,
        empty_call_secs: float,
    ) -> None:
        # Single steps come first, whatever is given.
        super().__init__(None, num_workers, last_step, prepare_secs)
        self._given = steps_per_call
        self._empty_call_secs = empty_call_secs
        self.prefetch = 0
        self.why = ""
        #: The times of the first step of a call on a worker, and of each other one, as far as they are known.
        self._first_secs = self._later_secs = 0.0

    def _decide(self, step_secs: float) -> None:
        step_secs *= self.num_workers
        if self.why:
            if self._last_step is None:
                # More is expected all the time.
                self._take(self._best_size(), self.prefetch)
        elif not self._first_secs:
            if self._trained_secs >= _SINGLE_SECS:
                self._leave_single_steps(step_secs)
        elif self._trained_secs >= max(_TRIAL_SECS, GROWTH * self._cost_secs if self._last_step is None else 0.0):
            self._judge(step_secs)

    def _leave_single_steps(self, step_secs: float) -> None:
        first_secs = max(step_secs - self._empty_call_secs, step_secs / GROWTH)
        # In an empty call, messages travel to and fro twice, as the values and the gradients of a step do. These are
        # longer.
        compute_secs = first_secs - _STEP_WAITS * self._empty_call_secs
        prefetch = next((p for p in _PREFETCHES if first_secs / (p + 1) <= compute_secs), _PREFETCHES[-1])
        self._first_secs, self._later_secs = first_secs, first_secs / (prefetch + 1)
        size = self._best_size()
        if size > 1:
            self._take(size, prefetch)
            return
        self._first_secs = 0.0
        if self._given:
            self.why = "a call of one step has nothing to begin ahead"

    def _judge(self, step_secs: float) -> None:
        """Decides by the speed of the calls that were tried."""
        size, prefetch = self.steps_per_call, self.prefetch
        without_secs = (self._empty_call_secs + size * self._first_secs) / size
        self._later_secs = max(0.0, size * step_secs - self._empty_call_secs - self._first_secs) / (size - 1)
        if without_secs < _GAIN * step_secs:
            prefetch, self._later_secs = 0, self._first_secs
        while prefetch > 1 and self._first_secs / (prefetch // 2 + 1) <= _SAME * self._later_secs:
            prefetch //= 2
        self.why = "more is not faster" if prefetch < self.prefetch else "more is not tried"
        # Fresher gradients alone do not repay the time in which nothing is trained.
        if prefetch < self.prefetch and self._steps_left * step_secs / self.num_workers < GROWTH * self._cost_secs:
            self.why = "too little is left to train for another number"
            return
        self._take(self._best_size(), prefetch)

    def _take(self, size: int, prefetch: int) -> None:
        if (size, prefetch) != (self.steps_per_call, self.prefetch):
            # Fixed, also near the end: preparing smaller calls would take longer than a worker waits for the others.
            self._fixed, self.prefetch = size, prefetch
            self._begin_with(size)

    def _best_size(self) -> int:
        """The steps of a call with which what is left to train takes the least time, its preparation included."""
        if self._given is not None:
            return self._given
        present = self.steps_per_call

        def secs(size: int) -> float:
            training_secs = self._steps_left * self._step_secs(size) / self.num_workers
            return training_secs + (0.0 if size == present else self._cost_of(size))

        allowed = [
            size
            for size in _SIZES
            if size * self._step_secs(size) <= self.longest_secs and self._is_soon_prepared(size)
        ]
        return min([present, *allowed], key=secs)

    def _step_secs(self, size: int) -> float:
        """The time of a step of a worker by the model, in calls of a size."""
        return (self._empty_call_secs + self._first_secs + (size - 1) * self._later_secs) / size
