"""`SecondOrStepTimer`: when a hook acts, by steps or seconds. After `tf.compat.v1.train`'s of that name."""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Real
from typing import ClassVar

from kdist.config.checks import check_whole_number
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, RunContext, RunValues, Session


class SecondOrStepTimer:
    """Tells when an action is due: at multiples of `every_steps`, or `every_secs` after the last time.

    With both, whichever comes first. TF1's timer counted steps from the last trigger; multiples give the same steps for
    a run that starts at 0, and let hooks share the boundaries at which the session has to stop, also after a resume.

    Args:
        every_steps: act at global steps divisible by this; at least 1.
        every_secs: act when this many seconds have passed; more than 0.
        owner: named in errors, as `hooks.checkpoint`.
        from_first_step: also act at the first step of a session, and count `every_steps` from the last time.
        clock: returns seconds; replaced in tests.

    Raises:
        ConfigError: neither is given, or one is out of range.
    """

    def __init__(
        self,
        *,
        every_steps: int | None = None,
        every_secs: float | None = None,
        owner: str,
        from_first_step: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is None and every_secs is None:
            raise ConfigError(f"{owner}: give every_steps or every_secs; to remove the hook set {owner}=null")
        check_whole_number(f"{owner}.every_steps", every_steps)
        if every_secs is not None and not (isinstance(every_secs, Real) and every_secs > 0):
            raise ConfigError(f"{owner}.every_secs={every_secs}: must be more than 0")
        self._every_steps = every_steps
        self._every_secs = every_secs
        self._clock = clock
        self._from_first_step = from_first_step
        self._next_step: int | None = None
        self._last_step = 0
        self._last_time = clock()

    def start(self, step: int) -> None:
        """Starts at `step`, now: at the start of a session."""
        self.restart(step)
        if self._from_first_step:
            self._next_step = step + 1

    def restart(self, step: int) -> None:
        """Restarts at `step`, now: after the action."""
        self._last_step = step
        self._last_time = self._clock()
        if self._from_first_step:
            self._next_step = None if self._every_steps is None else step + self._every_steps

    def due(self, step: int) -> bool:
        """True if a multiple, or the time, was reached since the last start."""
        if self._next_step is not None:
            if step >= self._next_step:
                return True
        elif self._every_steps is not None and step // self._every_steps > self._last_step // self._every_steps:
            return True
        return self._every_secs is not None and self._clock() - self._last_time >= self._every_secs

    def due_in(self, step: int) -> int | None:
        """Steps from `step` to the next time; None if only seconds decide."""
        if self._next_step is not None:
            return max(1, self._next_step - step)
        return None if self._every_steps is None else self._every_steps - step % self._every_steps


class TimedHook(Hook):
    """Acts when its timer is due: every `_default_steps` if neither steps nor seconds are given.

    The arguments, and what a class sets, are as in `SecondOrStepTimer`.
    """

    _owner: ClassVar[str]
    _default_steps: ClassVar[int | None] = None
    _from_first_step: ClassVar[bool] = False

    def __init__(
        self,
        every_steps: int | None = None,
        every_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timer = SecondOrStepTimer(
            every_steps=self._default_steps if every_steps is None and every_secs is None else every_steps,
            every_secs=every_secs,
            owner=self._owner,
            from_first_step=self._from_first_step,
            clock=clock,
        )
        self._forget()

    def _forget(self) -> None:
        """Discards the values gathered since the last act."""

    def after_create_session(self, session: Session) -> None:
        self._timer.start(session.global_step)
        self._forget()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._timer.due(values.global_step):
            self._act(context.session)
            self._timer.restart(values.global_step)
            self._forget()

    def _act(self, session: Session) -> None:
        """Acts; called when the timer is due."""

    def due_in(self, step: int) -> int | None:
        return self._timer.due_in(step)
