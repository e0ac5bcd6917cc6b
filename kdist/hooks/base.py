"""The hook contract: what may happen around the calls of a training session.

A session uses its hooks like this (after `tf.compat.v1.train.SessionRunHook`):

    for hook in hooks: hook.begin(session)
    restore the newest checkpoint, or initialise
    for hook in hooks: hook.after_create_session(session)       # and again after every recovery
    while not session.should_stop():
        n = the fewest steps that any hook.due_in(step) allows
        for hook in hooks: hook.before_run(context)
        run n steps
        for hook in hooks: hook.after_run(context, values)
    for hook in hooks: hook.end(session)                        # only if nothing was raised
    for hook in hooks: hook.close()                             # always

What a hook raises ends the session: later hooks are not called for that event, `end` is skipped, and every hook is
closed. While a hook is called no step is in flight, so what it reads is consistent; a hook that looks at no more than
the `values` of a run can allow workers to go on meanwhile (`idle_in`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kdist.metrics import MetricTotals
    from kdist.result import Contributions
    from kdist.session import TrainSession


@dataclass(frozen=True)
class RunContext:
    """What is about to run.

    Attributes:
        session: the session that runs it.
        global_step: updates applied so far.
        num_steps: updates that this run adds.
    """

    session: TrainSession
    global_step: int
    num_steps: int

    def request_stop(self, reason: str) -> None:
        """Lets the session end after this run; `reason` becomes `stopped_by` in the result."""
        self.session.request_stop(reason)


@dataclass(frozen=True)
class RunValues:
    """What one run of a session brought.

    Attributes:
        global_step: updates applied after it.
        num_steps: updates that it added.
        num_examples: examples that they saw.
        seconds: how long it took.
        warming_up: whether functions were traced meanwhile, so that `seconds` says nothing about speed.
        totals: loss and metrics over its steps; `totals.logs` are their values, and totals of several runs add up.
        staleness: int array `[num_steps]`, for each update how many others came between its pull and its push.
        contributions: what became of each worker's gradients, by worker index; empty without workers.
    """

    global_step: int
    num_steps: int
    num_examples: int
    seconds: float
    warming_up: bool
    totals: MetricTotals
    staleness: np.ndarray
    contributions: Mapping[int, Contributions] = field(default_factory=dict)


class Hook:
    """Base of all hooks; every method does nothing. See the module's text for when each is called.

    A hook belongs to one session at a time; `begin` starts it afresh.
    """

    #: Whether only the chief runs this hook. The other tasks of kdist know nothing of hooks so far.
    chief_only = True

    #: Whether it does nothing without validation data, so that a fit without any is refused.
    needs_validation = False

    def begin(self, session: TrainSession) -> None:
        """Called once, before anything is restored."""

    def after_create_session(self, session: TrainSession) -> None:
        """Called when values are restored or initialised; `session.global_step` is right from here on."""

    def before_run(self, context: RunContext) -> None:
        """Called before every run."""

    def after_run(self, context: RunContext, values: RunValues) -> None:
        """Called after every run."""

    def after_validation(self, session: TrainSession, logs: Mapping[str, float]) -> None:
        """Called when the model was validated at `session.global_step`, with the validation loss and metrics."""

    def end(self, session: TrainSession) -> None:
        """Called once at a clean end."""

    def close(self) -> None:
        """Called once at any end, also after an error; releases what the hook holds."""

    def due_in(self, step: int) -> int | None:
        """How many steps may pass after `step` before the hook must be called; None if any number."""
        return None

    def idle_in(self, step: int) -> int | None:
        """How many steps may be begun after `step` before the hook must find nothing in flight; None if any number.

        0, as here, is after every run. With asynchronous workers a hook costs nothing if they need not wait for it.
        """
        return 0
