"""`StepCounter`: the speed of training. After `tf.compat.v1.train.StepCounterHook`."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.strategies.gradient_counts import GradientCounts, add_counts


class StepCounter(TimedHook):
    """Writes `perf/steps_per_sec` and `perf/examples_per_sec` to TensorBoard.

    With parameter servers also `perf/steps_per_sec/worker_0` and so on: the rates of each worker's gradients that were
    part of an update.

    Args:
        every_steps: steps between two values; 100 if neither is given, as in TF1.
        every_secs: seconds between two values.
        clock: returns seconds; replaced in tests.
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_secs: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(every_steps, every_secs, "hooks.step_counter", default_steps=100, clock=clock)

    def _forget(self) -> None:
        self._num_steps = 0
        self._num_examples = 0
        self._seconds = 0.0
        self._gradient_counts: dict[int, GradientCounts] = {}

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if not values.warming_up:
            self._num_steps += values.num_steps
            self._num_examples += values.num_examples
            self._seconds += values.seconds
            self._gradient_counts = add_counts(self._gradient_counts, values.gradient_counts)
        if self._timer.due(values.global_step):
            if self._seconds > 0:
                self.report(context.session, self._num_steps / self._seconds, self._num_examples / self._seconds)
                self._report_workers(context.session)
            self._timer.restart(values.global_step)
            self._forget()

    def report(self, session: Session, steps_per_sec: float, examples_per_sec: float) -> None:
        """Reports the speed of training over all replicas; tracing does not count."""
        scalars = {"perf/steps_per_sec": steps_per_sec, "perf/examples_per_sec": examples_per_sec}
        session.summaries.scalars("train", scalars, session.global_step)

    def _report_workers(self, session: Session) -> None:
        num_all = max(1, sum(counts.accepted for counts in self._gradient_counts.values()))
        for worker, counts in self._gradient_counts.items():
            # All batches are full and have the same size.
            num_examples = self._num_examples * counts.accepted / num_all
            rates = {
                f"perf/steps_per_sec/worker_{worker}": counts.accepted / self._seconds,
                f"perf/examples_per_sec/worker_{worker}": num_examples / self._seconds,
            }
            session.summaries.scalars("train", rates, session.global_step)
