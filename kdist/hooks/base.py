"""The hook contract: the events around the calls of a training session.

A session calls its hooks in this order (after `tf.compat.v1.train.SessionRunHook`):

    for hook in hooks: hook.begin(session)
    restore the newest checkpoint, or initialize
    for hook in hooks: hook.after_create_session(session)       # and again after every recovery
    while not session.should_stop():
        # while there is nothing to read, at the end of a pass or of the arrived data: hook.while_waiting(session)
        n = the fewest steps that any hook.due_in(step) allows
        for hook in hooks: hook.before_run(context)
        run n steps
        for hook in hooks: hook.after_run(context, values)      # a hook that saves a delta: hook.after_delta(path)
        # when LoggingTensor reports: hook.after_logging(...); after a validation: hook.after_validation(...)
        # between two runs, if the cluster has changed: hook.after_resize(...)
    for hook in hooks: hook.end(session)                        # only if nothing was raised
    for hook in hooks: hook.close()                             # always

A fit calls `before_fit` of all hooks before that, and `after_fit` after it.

An exception that a hook raises ends the session: later hooks are not called for that event, `end` is skipped, and every
hook is closed.

A hook that prints the loss every 500 steps:

    class PrintLoss(kdist.hooks.Hook):
        def after_run(self, context, values):
            if values.global_step % 500 == 0:
                context.session.print_line(f"{values.global_step}: {values.totals.loss:.3f}")

        def due_in(self, step):
            return 500 - step % 500

Asynchronous workers keep training while hooks run. `session.read`, `session.write` and `session.save` wait until no
step is in flight, so a hook reads consistent values, but they may be a few steps past `values.global_step`. A hook that
needs the values of exactly that step overrides `idle_in`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kdist.run.statistics import RunValues

if TYPE_CHECKING:
    from kdist.config.schema import ClusterConfig
    from kdist.model.logs import Logs
    from kdist.model.metrics import MetricTotals
    from kdist.run.checkpoint import Checkpoints
    from kdist.run.resizes import Resize
    from kdist.run.result import Result
    from kdist.run.summaries import Summaries
    from kdist.strategies.base import Strategy, TrainingSpec

__all__ = ["Hook", "RunContext", "RunValues", "Session"]


class Session(Protocol):
    """The session as hooks see it; `kdist.TrainSession` is one.

    Attributes:
        strategy: runs the steps and holds the values.
        spec: the training: model, data, batch size, seed.
        checkpoints: of the run.
        summaries: TensorBoard writers of the run.
        last_step: the global step that `fit` was told to stop at; None if only hooks decide.
        global_step: updates applied, as the hooks have seen them.
        interrupted: whether a signal ends the session.
        cluster: the config of the cluster.
        print_line: prints a line, unless the user asked for silence.
    """

    strategy: Strategy
    spec: TrainingSpec
    checkpoints: Checkpoints
    summaries: Summaries
    last_step: int | None
    global_step: int
    interrupted: bool
    cluster: ClusterConfig
    print_line: Callable[[str], None]

    @property
    def hooks(self) -> Sequence[Hook]:
        """All hooks, in the order of their calls."""

    @property
    def run_dir(self) -> Path:
        """The folder of all files of the run."""

    @property
    def is_asynchronous(self) -> bool:
        """True if an update may be computed from older parameters than it is applied to."""

    @property
    def restarts(self) -> Mapping[str, int]:
        """The number of workers that were lost and returned (`worker`), and of restarts of the cluster (`cluster`)."""

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint of the present step exists, or training has diverged."""

    def should_stop(self) -> bool:
        """True if a hook, a signal or the caller asked to stop."""

    def request_stop(self, reason: str) -> None:
        """Ends the session before its next run. The first reason counts."""

    def stop_diverged(self, reason: str) -> None:
        """Like `request_stop`, and saves no further checkpoint."""

    def resize(
        self, workers: int | None = None, ps: int | None = None, move: str | None = None, why: str = "session.resize"
    ) -> Future[Resize]:
        """Changes the cluster between two of the next runs; see `TrainSession.resize`."""

    def read(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Returns the values that training changes, by their names in a checkpoint; only `names` if they are given."""

    def read_into(self, take: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Passes all values to `take` in portions, so that they are not in memory at once."""

    def write(self, values: Mapping[str, np.typing.ArrayLike]) -> None:
        """Sets values by their names in a checkpoint; `learning_rate` belongs to the optimizer."""

    @property
    def is_saved_in_full(self) -> bool:
        """Like `is_saved`, but a delta of the present step does not count."""

    def save(self, *, keep: int, full_every: int = 1) -> None:
        """Saves a checkpoint of the present step and keeps the newest `keep` full ones; see `CheckpointSaver`."""

    def begin_save(self, *, full_every: int = 1) -> None:
        """Begins a save that is written while training continues; `finish_save` must follow."""

    def finish_save(self, *, keep: int, wait: bool = True) -> bool:
        """Completes the checkpoint that is being written; returns whether it is complete now."""

    def restore_values(self, others: Checkpoints) -> None:
        """Restores the newest of other checkpoints at the present step, except the learning rate."""

    def publish_validation(self, logs: Mapping[str, Any]) -> None:
        """Passes the validation loss and metrics of the present step to every hook."""

    def training_logs(self, totals: MetricTotals) -> Logs:
        """Returns loss and metrics of some steps, with the `extra_logs` of hooks."""

    def learning_rate(self) -> float:
        """The learning rate of the next update."""


@dataclass(frozen=True)
class RunContext:
    """The next run of a session.

    Attributes:
        session: the session that runs it.
        global_step: updates applied so far.
        num_steps: updates that this run adds.
    """

    session: Session
    global_step: int
    num_steps: int

    def request_stop(self, reason: str) -> None:
        """Ends the session after this run; `reason` becomes `stopped_by` in the result."""
        self.session.request_stop(reason)


class Hook:
    """Base class of all hooks; every method does nothing. The module docstring says when each is called.

    Hooks run on the chief alone. A hook belongs to one session at a time; `begin` resets it.
    """

    #: Whether the hook does nothing without validation data, so that a fit without it is refused.
    needs_validation = False

    def before_fit(self, run_dir: Path, result: Result) -> None:
        """Called first of all, with the known part of the result: config, strategy, cluster, seed."""

    def begin(self, session: Session) -> None:
        """Called once, before anything is restored."""

    def after_create_session(self, session: Session) -> None:
        """Called when values are restored or initialized; `session.global_step` is correct from here on."""

    def before_run(self, context: RunContext) -> None:
        """Called before every run."""

    def after_run(self, context: RunContext, values: RunValues) -> None:
        """Called after every run."""

    def while_waiting(self, session: Session) -> None:
        """Called while there is nothing to train on: again and again if data keeps arriving, or where a pass ends."""

    def after_logging(self, session: Session, logs: Mapping[str, Any], steps_per_second: float | None) -> None:
        """Called when `LoggingTensor` reports, with loss and metrics of the steps since its last report.

        The rate covers these steps, or the previous report if functions were traced in all of them; None at first.
        """

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        """Called with the validation loss and metrics when the model was validated at `session.global_step`."""

    def after_resize(self, session: Session, resize: Resize) -> None:
        """Called when the cluster has other tasks: workers or parameter servers have joined, left or moved."""

    def after_progressive_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        """Called with the values of a `ProgressiveValidation`, each time when its examples are all new."""

    def extra_logs(self) -> Mapping[str, Any]:
        """Returns values to report with loss and metrics of training, by name.

        It is called after `after_run`; in a fit, hooks that override it are called before the others.
        """
        return {}

    def after_delta(self, path: Path) -> None:
        """Called when a delta is complete, see `CheckpointSaver`; `tf.train.load_checkpoint(path)` reads it."""

    def end(self, session: Session) -> None:
        """Called once when training ends without an error."""

    def close(self) -> None:
        """Called once at any end, also after an error; releases resources of the hook."""

    def after_fit(self, result: Result) -> None:
        """Called last of all, when `result.json` and `model.keras` are written, also after an error."""

    def due_in(self, step: int) -> int | None:
        """Returns the number of steps that may pass after `step` before the hook is called; None: any number."""
        return None

    def idle_in(self, step: int) -> int | None:
        """Returns the number of steps that may start after `step` before none may be in flight; None: any number.

        Only a hook that needs the values of an exact step overrides it, usually by `return self.due_in(step)`:
        asynchronous workers then wait for the hook.
        """
        return None
