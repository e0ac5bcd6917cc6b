"""`StepCounter`: the speed of training. After `tf.compat.v1.train.StepCounterHook`."""

from __future__ import annotations

from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.run.statistics import RunStatistics


class StepCounter(TimedHook):
    """Writes `perf/steps_per_sec` and `perf/examples_per_sec` to TensorBoard.

    With parameter servers also `perf/steps_per_sec/worker_0` and so on: the rates of each worker's gradients that were
    part of an update.

    Args:
        every_steps: steps between two values; 100 if neither is given, as in TF1.
        every_secs: seconds between two values.
        clock: returns seconds; replaced in tests.
    """

    _owner = "hooks.step_counter"
    _default_steps = 100

    def _forget(self) -> None:
        self._steady = RunStatistics()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if not values.warming_up:
            self._steady.add(values)
        if self._timer.due(values.global_step):
            steps_per_sec, examples_per_sec = self._steady.steps_per_second, self._steady.examples_per_second
            if steps_per_sec is not None and examples_per_sec is not None:
                self.report(context.session, steps_per_sec, examples_per_sec)
                self._report_workers(context.session, steps_per_sec, examples_per_sec)
            self._timer.restart(values.global_step)
            self._forget()

    def report(self, session: Session, steps_per_sec: float, examples_per_sec: float) -> None:
        """Reports the speed of training over all replicas; tracing does not count."""
        scalars = {"perf/steps_per_sec": steps_per_sec, "perf/examples_per_sec": examples_per_sec}
        session.summaries.scalars("train", scalars, session.global_step)

    def _report_workers(self, session: Session, steps_per_sec: float, examples_per_sec: float) -> None:
        by_worker = self._steady.gradients.by_worker
        num_all = max(1, sum(counts.accepted for counts in by_worker.values()))
        for worker, counts in by_worker.items():
            name = worker.replace(":", "_")
            rates = {
                f"perf/steps_per_sec/{name}": steps_per_sec * counts.accepted / max(1, self._steady.applied),
                # All batches are full and have the same size.
                f"perf/examples_per_sec/{name}": examples_per_sec * counts.accepted / num_all,
            }
            session.summaries.scalars("train", rates, session.global_step)
