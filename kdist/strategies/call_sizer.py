"""`CallSizer`: the number of steps of the next call."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kdist.config.scheduler import GRACE_SECS, secs_for_calls

# A call should be long compared with the few ms that it costs to dispatch, and short compared with a person's patience.
AUTO_CALL_SECS = 1.0
_AUTO_MAX_STEPS = 64
GROWTH = 4
# A call costs the chief about 2 ms of its CPU, whatever it takes on the worker. Where the chief is what limits, that is
# the time of a step for each worker, and calls of GROWTH steps may take GROWTH times that.
_SECS_PER_WORKER = GROWTH * 0.0025
#: Single steps show how long they take in so many seconds.
_AUTO_FIRST_SECS = 0.1
#: Tasks prepare their parts of a function in about the time in which it was traced.
_SECS_PER_TRACED = 2.0
#: Of the time in which a first step is traced, and prepared; the rest is taken once. What steps share is not in it.
_SHARE_OF_STEP, _SHARE_BESIDE_SHARED_STEP = 0.25, 0.5


class CallSizer:
    """Decides how many steps the next call unrolls.

    With `auto` it starts with single steps and then takes four times as many at a time, so that few sizes are needed.
    It stops growing when calls would become long, or would take long to prepare, or when larger ones would not save the
    time that a new size costs: it has to be traced, and prepared by every worker. What that costs follows from the
    present size: one part is the same for all sizes, the other is in proportion to the time of the trace. The overhead
    of a call follows from the last two sizes. It is measured for as long as a size took to prepare; single steps only
    for a moment, if there are many of them left. If the end of training is not known, it is assumed to last as long
    again as it has so far (as in ski rental).

    Args:
        steps_per_call: a fixed number of steps, or None for `auto`.
        num_workers: workers that share the steps.
        last_step: the global step that training is to end at; None if nobody knows.
        prepare_secs: seconds within which calls have to be prepared; nothing can be saved meanwhile.
    """

    def __init__(
        self,
        steps_per_call: int | None,
        num_workers: int,
        last_step: int | None = None,
        prepare_secs: float = secs_for_calls(GRACE_SECS),
    ) -> None:
        self._trace_secs: Mapping[int, float] = {}
        self._share_of_step = _SHARE_OF_STEP
        self._fixed = steps_per_call
        self.num_workers = num_workers
        self._last_step = last_step
        self._prepare_secs = prepare_secs
        self._step = 0
        self._auto = 1
        #: The cost of preparing calls of the present size, and whether tasks are to prepare them again.
        self._cost_secs = 0.0
        self._prepares_again = False
        self._trained_secs = 0.0
        self._trained_steps = 0
        #: The duration of a step with the previous size; after a change of the cluster, its ratio to the present one.
        self._step_secs_before: float | None = None
        self._times_slower: float | None = None

    @property
    def steps_per_call(self) -> int:
        """The steps of a call, if enough steps are left."""
        return self._fixed or self._auto

    @property
    def longest_secs(self) -> float:
        """The seconds that a chosen call may take; the more workers, the longer, so that one chief can drive them."""
        return max(AUTO_CALL_SECS, _SECS_PER_WORKER * self.num_workers)

    @property
    def _steps_left(self) -> int:
        return self._trained_steps if self._last_step is None else self._last_step - self._step

    def go_by(self, trace_secs: Mapping[int, float], *, shares_step: bool) -> None:
        """Estimates what preparing calls takes by the times of traces, present and future; see `Calls`."""
        self._trace_secs = trace_secs
        self._share_of_step = _SHARE_BESIDE_SHARED_STEP if shares_step else _SHARE_OF_STEP

    def begin_at(self, step: int) -> None:
        self._step = step

    def resize(self, num_workers: int) -> None:
        """Measures anew, since as many workers share the steps from now on, or tasks prepare the calls again.

        The rate need not follow their number: the chief, servers or cores may be the limit. The ratio between a step at
        the previous size and one at the present size is assumed to stay the same.
        """
        if self._step_secs_before is not None:
            self._times_slower = None
            if self._trained_secs >= _AUTO_FIRST_SECS and self._trained_steps:
                self._times_slower = self._step_secs_before * self._trained_steps / self._trained_secs
            self._step_secs_before = None
        self.num_workers = num_workers
        self._trained_secs, self._trained_steps = 0.0, 0
        self.prepare_again()

    def prepare_again(self) -> None:
        """Lets the cost of the present calls, which tasks prepare again, replace the earlier one."""
        self._prepares_again = True

    def next_size(self, remaining: int) -> int:
        """The steps of the next call when `remaining` steps are left to assign."""
        if self._fixed is not None and remaining >= self._fixed:
            return self._fixed
        at_most, size = min(self.steps_per_call, remaining), 1
        if self._fixed is None:
            # Near the end every worker still gets its share.
            at_most = min(at_most, math.ceil(remaining / self.num_workers))
        while size * GROWTH <= at_most:
            size *= GROWTH
        return size

    def observe(self, num_steps: int, secs: float, *, warming_up: bool) -> None:
        """Learns from finished steps of all workers; `warming_up` if functions were traced or prepared meanwhile."""
        self._step += num_steps
        if warming_up:
            # What it cost before would count once more for each change of the cluster.
            self._cost_secs = secs + (0.0 if self._prepares_again else self._cost_secs)
            self._prepares_again = False
            return
        self._trained_secs += secs
        self._trained_steps += num_steps
        # Steps may have finished before they were waited for: the duration of one is only known over a longer time.
        if self._trained_steps:
            self._decide(self._trained_secs / self._trained_steps)

    def _decide(self, step_secs: float) -> None:
        """Takes calls of another size if they are expected to pay; `step_secs` of all workers together."""
        is_known = self._trained_secs >= self._cost_secs or self._is_only_beginning(step_secs)
        if is_known and self._pays(GROWTH * self._auto, step_secs):
            self._step_secs_before, self._times_slower = step_secs, None
            self._begin_with(GROWTH * self._auto)

    def _begin_with(self, size: int) -> None:
        self._auto = size
        self._cost_secs, self._trained_secs, self._trained_steps = 0.0, 0.0, 0

    def _is_only_beginning(self, step_secs: float) -> bool:
        """Tells whether single steps are known to be the smaller part of what is left to train."""
        if self._last_step is None or self._auto > 1 or self._trained_secs < _AUTO_FIRST_SECS:
            return False
        # Two more sizes are to come.
        return self._steps_left * step_secs >= self._cost_of(GROWTH) + self._cost_of(GROWTH**2)

    def _pays(self, larger: int, step_secs: float) -> bool:
        """Tells whether calls of that many steps are short, soon prepared, and save more than they cost to prepare."""
        if larger > _AUTO_MAX_STEPS or larger * step_secs * self.num_workers > self.longest_secs:
            return False
        if not self._is_soon_prepared(larger):
            return False
        before = self._step_secs_before if self._times_slower is None else self._times_slower * step_secs
        if before is None:
            # Most of the time of a single step may be that of its call.
            return True
        return (before - step_secs) / GROWTH * self._steps_left >= self._cost_of(larger)

    def _is_soon_prepared(self, size: int) -> bool:
        return self._cost_of(size) <= self._prepare_secs

    def _cost_of(self, size: int) -> float:
        """The seconds that preparing calls of another size takes."""
        present = self.steps_per_call
        of_steps = min(self._cost_secs, _SECS_PER_TRACED * self._trace_secs.get(present, math.inf))
        if present == 1:
            of_steps *= self._share_of_step
        return self._cost_secs + of_steps * (size / present - 1)
