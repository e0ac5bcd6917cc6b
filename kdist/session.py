"""`TrainSession`: the training loop with its hooks, as TF1's `MonitoredTrainingSession` was.

with TrainSession(make_strategy, spec, hooks, ...) as session:
    while not session.should_stop():
        session.run()
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from kdist.cluster.spec import ClusterChange
from kdist.config.schema import RESUME_MODES, ClusterConfig, RunConfig, TrainConfig
from kdist.console import lines
from kdist.errors import CheckpointError, ClusterError, ConfigError, NoWorkersError, ResizeError, TornUpdateError
from kdist.forks import children_end_here
from kdist.hooks.base import Hook, RunContext, RunValues
from kdist.hooks.data_position import hooks_of
from kdist.log import say, warn
from kdist.model.names import LEARNING_RATE
from kdist.run.resizes import Resize, Resizer, ResizeRequest, ResizeRequests
from kdist.run.result import now
from kdist.run.save_state import SaveState
from kdist.run.statistics import RunStatistics

T = TypeVar("T")

if TYPE_CHECKING:
    from pathlib import Path

    from kdist.cluster.spec import ClusterShape
    from kdist.model.metrics import MetricTotals
    from kdist.run.checkpoint import Checkpoints
    from kdist.run.summaries import Summaries
    from kdist.strategies.base import PendingResize, Strategy, TrainingSpec

_RUNS_TO_FORGET = 100
#: Why a session ends that its caller leaves.
_CALLER = "the caller"
# A run takes at most this long, for hooks that act by the clock.
_LONGEST_SECS = 1.0
_FIRST_STEPS = 16
_REMEMBERED_SECS = 5.0
#: Seconds between two looks for workers, when there are too few.
_LOOK_SECS = 0.2
_GROWTH = 4


class Resized(NamedTuple):
    """The parts of a session that depend on the shape of its cluster, see `TrainSession`."""

    make_strategy: Callable[[], Strategy]
    spec: TrainingSpec
    last_step: int | None


class TrainSession:
    """Trains by a strategy, and calls hooks around its steps.

    Entering it starts the strategy and restores the newest checkpoint; leaving it stops the strategy and closes the
    hooks, whatever happened. After a failure of the cluster in between, training resumes from the newest checkpoint.

    Args:
        make_strategy: makes a strategy, not started; called again for each new cluster.
        spec: the training.
        hooks: called in this order; `kdist.hooks.base` says when.
        checkpoints: to resume from and save to.
        summaries: TensorBoard writers for the hooks.
        last_step: the global step that `fit` was told to stop at; None if only hooks decide.
        resume: `auto` resumes if there is a checkpoint, `must` fails if there is none, `never` starts over and sets
            older checkpoints aside. None continues from the model as it is, and sets checkpoints of later steps aside.
        max_restarts: the number of times that training resumes after a failure of the cluster.
        may_restart_tasks: true if it also resumes after failures that did not leave the tasks running.
        print_line: prints lines about saving and loading.
        clock: returns seconds; replaced in tests.
        resized: finds what another shape of the cluster changes.
        requests: changes of the cluster that others ask for.
        cluster: how long a change of the cluster may take, and how few workers it may leave.

    Attributes:
        resizes: the changes of the cluster so far.
    """

    def __init__(
        self,
        make_strategy: Callable[[], Strategy],
        spec: TrainingSpec,
        hooks: Sequence[Hook],
        *,
        checkpoints: Checkpoints,
        summaries: Summaries,
        last_step: int | None = None,
        resume: str | None = RunConfig.resume,
        max_restarts: int = TrainConfig.max_restarts,
        may_restart_tasks: bool = True,
        print_line: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
        resized: Callable[[TrainSession, ClusterShape], Resized] | None = None,
        requests: ResizeRequests | None = None,
        cluster: ClusterConfig | None = None,
    ) -> None:
        if resume is not None and resume not in RESUME_MODES:
            raise ConfigError(f"run.resume={resume}: choose one of {', '.join(RESUME_MODES)}")
        self.strategy = make_strategy()
        self.spec = spec
        self.hooks = list(hooks)
        self.checkpoints = checkpoints
        self.summaries = summaries
        self.last_step = last_step
        self.global_step = 0
        self.first_step = 0
        self.stopped_by: str | None = None
        self.interrupted = False
        self.is_started = False
        self.statistics = RunStatistics()
        self._make_strategy, self._resized = make_strategy, resized
        self.resizes: list[Resize] = []
        self.cluster = cluster or ClusterConfig()
        timeout, min_workers = self.cluster.step_timeout, self.cluster.min_workers
        self._resizer = Resizer(requests or ResizeRequests(), timeout, min_workers)
        self._max_restarts, self._may_restart_tasks = max_restarts, may_restart_tasks
        #: Numbers of times that training has resumed, and of these on a new cluster, and of restarts of workers in the
        #: clusters before the present one.
        self._num_restarts = self._num_new_clusters = self._num_worker_restarts = 0
        self._resume = resume
        self.print_line = print_line
        self._clock = clock
        self._saves = SaveState(checkpoints, self._has_saved)
        self._run_length = RunLength()
        self._counted_until: float | None = None
        self._num_runs = 0
        #: True if a caller further out recovers from a failure of the cluster.
        self._is_recovering = False

    def __enter__(self) -> TrainSession:
        try:
            with self._recovery_is_ours():
                for hook in self.hooks:
                    hook.begin(self)
                self.strategy.start(self.spec)
                self._restore()
                for hook in self.hooks:
                    hook.after_create_session(self)
        except BaseException as error:
            self._close(error)
            raise
        self.is_started = True
        self._resizer.requests.open(self.run_dir, self.strategy.meeting_place)
        return self

    def should_stop(self) -> bool:
        """True if a hook, a signal or the caller asked to stop."""
        return self.stopped_by is not None

    def request_stop(self, reason: str) -> None:
        """Ends the session before its next run. The first reason counts."""
        if self.stopped_by is None:
            self.stopped_by = reason

    def interrupt(self, reason: str) -> None:
        """Like `request_stop`, but also ends the present run early; may be called from a signal handler."""
        self.interrupted = True
        self.request_stop(reason)
        # A validation in progress ends early, too.
        self.spec.model.stop_evaluating = True

    def stop_diverged(self, reason: str) -> None:
        """Like `request_stop`, but saves no further checkpoint: the parameters are worthless."""
        self._saves.diverged = True
        self.request_stop(reason)

    def run(self) -> RunValues | None:
        """Runs as many steps as the hooks allow, with the hooks around them.

        Returns:
            The values of the run; None if it was interrupted before its first step, if there was nothing to read, or if
            the cluster failed and training is back at the newest checkpoint.

        Raises:
            ClusterError: the cluster failed too often, or there is no checkpoint.
        """
        self._num_runs += 1
        if not self._num_runs % _RUNS_TO_FORGET:
            # Not above: `--help` imports this module, and needs no TensorFlow.
            from kdist._compat.tensorflow import forget_numbers

            forget_numbers()
        try:
            with self._recovery_is_ours():
                return self._run()
        except ClusterError as error:
            self._go_back(error)
            return None

    def resize(
        self,
        workers: int | None = None,
        ps: int | None = None,
        move: str | None = None,
        why: str = "session.resize",
    ) -> Future[Resize]:
        """Changes the cluster while it trains; may be called from a hook, and in any thread.

        Args:
            workers, ps: the number of workers, and of parameter servers, to have; None for as many as there are.
            move: a server, as `ps:0`, whose values another one takes, which joins in its place.
            why: for the record.

        Returns:
            The change, once it is made. It is made between two runs: the thread that calls `run` must not wait for it.
            Its errors are a `ConfigError` if it is refused, and a `ResizeError` if it has failed; then training
            continues on the cluster as it was.

        Raises:
            ConfigError: a value cannot be read.
        """
        return self._resizer.requests.add(ClusterChange.of(workers, ps, move), why)

    def read(self, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Returns the values that training changes, by name, when no step is in flight; only `names` if given."""
        return self._insist(lambda: self.strategy.values.read(names))

    def read_into(self, take: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Passes all values to `take` in portions, so that they are not in memory at once."""
        self._insist(lambda: list(map(take, self.strategy.values.portions())))

    def write(self, values: Mapping[str, np.typing.ArrayLike]) -> None:
        """Sets values on the tasks between two runs, by name; `learning_rate` belongs to the optimizer.

        Raises:
            ConfigError: there is no such value, or it has another shape, or the learning rate follows a schedule.
        """
        arrays = {name: np.asarray(value) for name, value in values.items()}
        if (learning_rate := arrays.pop("learning_rate", None)) is not None:
            self.spec.set_learning_rate(float(learning_rate))
            arrays[LEARNING_RATE] = learning_rate
        self.strategy.values.check(arrays)
        self.strategy.values.write(arrays)
        self._saves.note_write(arrays, self.strategy.values)

    def save(self, *, keep: int, full_every: int = 1) -> None:
        """Saves a checkpoint of the present step, unless there is nothing to save; keeps the newest `keep` full ones.

        Of `full_every` checkpoints one is full, and the others are deltas, if a `CheckpointSaver` asks for deltas.

        Raises:
            CheckpointError: it cannot be written.
            ConfigError: another chief has taken over the run dir.
            NonFiniteError: a value is NaN or infinite.
        """
        self._saves.write(self.strategy.values, keep=keep, full_every=full_every)

    def begin_save(self, *, full_every: int = 1) -> None:
        """As `save`, but the checkpoint is written while training continues; `finish_save` must follow."""
        self._saves.begin(self.strategy.values, full_every=full_every)

    def finish_save(self, *, keep: int, wait: bool = True) -> bool:
        """Completes the checkpoint that is being written; returns true if there was one, and it is complete now."""
        return self._saves.finish(keep=keep, wait=wait)

    def restore_values(self, others: Checkpoints) -> None:
        """Gives the present step the values of the newest of other checkpoints, but the learning rate."""
        self._saves.restore_values(self.strategy.values, others)

    @property
    def is_saved(self) -> bool:
        """True if a checkpoint of the present step exists, or training has diverged."""
        return self._saves.is_saved(self.strategy.values)

    @property
    def is_saved_in_full(self) -> bool:
        """The same, but a delta of the present step does not count."""
        return self._saves.is_saved(self.strategy.values, in_full=True)

    def publish_validation(self, logs: Mapping[str, Any]) -> None:
        """Passes the validation loss and metrics of the present step to every hook."""
        for hook in self.hooks:
            hook.after_validation(self, logs)

    def training_logs(self, totals: MetricTotals) -> dict[str, Any]:
        """Loss and metrics of some steps, and what hooks add to them: `session.training_logs(values.totals)`."""
        return {**totals.logs, **{name: v for hook in self.hooks for name, v in hook.extra_logs().items()}}

    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.spec.learning_rate(self.global_step)

    @property
    def restarts(self) -> dict[str, int]:
        """The number of workers that were lost and returned, and of restarts of the whole cluster."""
        workers = self._num_worker_restarts + self.strategy.worker_restarts
        return {"worker": workers, "cluster": self._num_new_clusters}

    @property
    def run_dir(self) -> Path:
        """The folder of all files of the run."""
        return self.checkpoints.folder.parent

    @property
    def is_asynchronous(self) -> bool:
        """True if an update may be computed from parameters that are older than those it is applied to."""
        return self.strategy.is_asynchronous

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.request_stop(_CALLER)
                self._insist(self._end)
        except BaseException as another:
            error = another
            raise
        finally:
            self._close(error)

    def _run(self) -> RunValues | None:
        self._resizer.advance(self.strategy, self.global_step, self._finish_resize)
        if self.strategy.num_workers < self.cluster.min_workers:
            self._wait_for_workers()
        step = self.global_step
        num_steps = max(1, self._run_length.fewest(hook.due_in(step) for hook in self.hooks))
        context = RunContext(self, step, num_steps)
        for hook in self.hooks:
            hook.before_run(context)
        busy = max(num_steps, self.strategy.steps_in_flight)
        may_begin = self._run_length.fewest((hook.idle_in(step) for hook in self.hooks), after=busy)
        return self._run_in(context, max(num_steps, may_begin))

    def _run_in(self, context: RunContext, may_begin: int) -> RunValues | None:
        values = self._run_steps(context.num_steps, may_begin)
        for hook in self.hooks:
            if values is not None:
                hook.after_run(context, values)
            elif not self.interrupted:
                hook.while_waiting(self)
        return values

    def _run_steps(self, num_steps: int, may_begin: int) -> RunValues | None:
        # While hooks ran, workers continued with steps that had been started: that time counts.
        started = self._clock() if self._counted_until is None else self._counted_until
        logs = self.strategy.run(num_steps, lambda: self.interrupted, may_begin)
        until = self._clock()
        if logs is not None and (ahead := self.strategy.steps_ahead) and not self.strategy.warming_up:
            # Steps of a call are done together: a part of the time is that of steps that the next runs return.
            until -= (until - started) * ahead / (ahead + logs.num_steps)
        seconds, self._counted_until = until - started, None if self.strategy.is_idle else until
        if logs is None:
            return None
        expected = self.global_step + logs.num_steps
        # A call repeated after its worker was lost counted its steps twice. The servers know the exact count, which can
        # be read when nothing is in flight.
        self.global_step = self.strategy.values.global_step() if self.strategy.is_idle else expected
        values = RunValues(
            global_step=self.global_step,
            num_steps=self.global_step - expected + logs.num_steps,
            seconds=seconds,
            warming_up=self.strategy.warming_up,
            steps=logs,
        )
        # Synchronous steps that are missing from the logs ran exactly once; only their metrics were lost.
        self.statistics.add(values, extra_steps=self.global_step - expected if self.is_asynchronous else 0)
        self._run_length.observe(values)
        return values

    def _wait_for_workers(self) -> None:
        """Waits until there are enough workers again; saves, and ends training, if they do not join in time."""
        cluster = self.cluster
        few = f"{self.strategy.num_workers} of at least {cluster.min_workers} workers (cluster.min_workers) are left"
        at_most = f"{cluster.patience_for_workers:g} s (cluster.patience_for_workers)"
        warn(f"{few}; waiting for others to join, at most {at_most}")
        self._take_begun()
        deadline = self._clock() + cluster.patience_for_workers
        while self.strategy.num_workers < cluster.min_workers and not self.interrupted:
            if self._clock() > deadline:
                self._saves.write(self.strategy.values, keep=sys.maxsize)
                raise NoWorkersError(f"{few}, and no other one has joined within {at_most}; the last step is saved")
            time.sleep(_LOOK_SECS)
            self.strategy.check_tasks()
            self._resizer.advance(self.strategy, self.global_step, self._finish_resize)

    def _finish_resize(self, request: ResizeRequest, pending: PendingResize) -> Resize:
        # A checkpoint that is being written is of the servers as they are.
        self._saves.settle(cluster_is_there=True)
        return self._resize(pending, str(request.change), request.why, request.asked)

    def _resize(self, pending: PendingResize, change: str, why: str, asked: float) -> Resize:
        """Changes the cluster, and tells everybody; `asked` is the time, of `time.monotonic`, at which it began."""
        started = self._clock()
        of_shape = Resized(self._make_strategy, self.spec, self.last_step)
        if self._resized is not None:
            of_shape = self._resized(self, pending.after)
        spec = self.strategy.finish_resize(pending, of_shape.spec)
        seconds = self._clock() - started
        self._counted_until = None
        if pending.changes_servers:
            self._saves.note_move()
        self._make_strategy, self.last_step = of_shape.make_strategy, of_shape.last_step
        if spec.data is not self.spec.data:
            # Their state is that of the session from now on.
            self.hooks[:0] = hooks_of(spec.data.splits, resumes=True)
        self.spec = spec
        before, after, waited = str(pending.before), str(pending.after), time.monotonic() - asked
        done = Resize(self.global_step, before, after, change, why, seconds, waited, now())
        self.resizes.append(done)
        self.print_line(lines.resize_line(self.global_step, self.last_step, done.to_dict()))
        for hook in self.hooks:
            hook.after_resize(self, done)
        return done

    def _end(self) -> None:
        self._take_begun()
        # Some steps of a discarded call may have been applied.
        self.global_step = self.strategy.values.global_step()
        for hook in self.hooks:
            hook.end(self)

    def _take_begun(self) -> None:
        """Lets the hooks see the steps that were begun ahead of the last run as well."""
        self.strategy.drain()
        if begun := self.strategy.steps_ahead:
            self._run_in(RunContext(self, self.global_step, begun), begun)

    def _insist(self, function: Callable[[], T]) -> T:
        """Calls a function that needs the cluster; if the cluster fails after the last step, trains to that step again.

        A failure inside a run, or while the session starts, is handled there.
        """
        if self._is_recovering:
            return function()
        while True:
            try:
                with self._recovery_is_ours():
                    return function()
            except ClusterError as error:
                stopped_by, self.stopped_by = self.stopped_by, None
                self._go_back(error)
                if stopped_by == _CALLER:
                    self.request_stop(_CALLER)
                while not self.should_stop():
                    self.run()

    @contextmanager
    def _recovery_is_ours(self) -> Iterator[None]:
        """Inside it, failures of the cluster are passed on to the caller."""
        before, self._is_recovering = self._is_recovering, True
        try:
            with children_end_here():
                yield
        finally:
            self._is_recovering = before

    def _go_back(self, error: ClusterError) -> None:
        """Resumes from the newest checkpoint, on a new cluster if the cluster has failed.

        Raises:
            ClusterError: `error`, or the error of a later failure, when no restart is left.
        """
        while True:
            cluster_is_there = isinstance(error, TornUpdateError)
            self._saves.settle(cluster_is_there=cluster_is_there)
            newest = self.checkpoints.newest()
            may_go_on = cluster_is_there or self.strategy.can_regroup or self._may_restart_tasks
            may_restart = self._num_restarts < self._max_restarts and may_go_on
            if newest is None or self.interrupted or not may_restart:
                raise error
            if self.checkpoints.steps()[-1] < self.first_step:
                # It belongs to an earlier fit: the values that this one began with were not saved.
                raise error
            self._num_restarts += 1
            counts = self._num_restarts, self._max_restarts
            goes_on = cluster_is_there or self.strategy.can_regroup
            warn(lines.again_line(error, newest, *counts, cluster_is_there=goes_on))
            self._counted_until = None
            try:
                with self._recovery_is_ours():
                    began = time.monotonic()
                    regrouped = None if cluster_is_there else self._regain_cluster()
                    self._restore_newest()
                    self.global_step = self.strategy.values.global_step()
                    if regrouped is not None:
                        self._finish_regrouping(regrouped, str(error).splitlines()[0], began)
                    self.summaries.restart(self.global_step)
                    for hook in self.hooks:
                        hook.after_create_session(self)
                return
            except ClusterError as another:
                error = another

    def _regain_cluster(self) -> PendingResize | None:
        """Makes a new cluster; or waits for the tasks that are left, and returns the change to them."""
        self._num_new_clusters += 1
        self._num_worker_restarts += self.strategy.worker_restarts
        if self.strategy.can_regroup:
            self._resizer.cancel(self.strategy, ResizeError("a worker was lost meanwhile"))
            return self.strategy.regroup(lambda: self.interrupted)
        self._resizer.begin_again()
        self.strategy.stop()
        self.strategy = self._make_strategy()
        self.strategy.start(self.spec)
        return None

    def _finish_regrouping(self, regrouped: PendingResize, why: str, began: float) -> None:
        if regrouped.leaving:
            self._resize(regrouped, str(ClusterChange(workers=regrouped.after.num_workers)), why, began)
        else:
            self.strategy.finish_resize(regrouped, self.spec)

    def _restore(self) -> None:
        if self._resume == "never":
            self.checkpoints.set_aside()
        restored = self._resume is not None and self._restore_newest()
        if not restored and self._resume == "must":
            raise CheckpointError(f"run.resume=must: there is no checkpoint in {self.checkpoints.place}")
        self.global_step = self.first_step = self.strategy.values.global_step()
        self.summaries.restart(self.global_step)
        if self._resume is None and any(step > self.first_step for step in self.checkpoints.steps()):
            self.checkpoints.set_aside()  # They would count as newer than those of this run.

    def _restore_newest(self) -> bool:
        """Restores the newest undamaged checkpoint; False if there is none."""
        self.checkpoints.tidy()
        if (path := self.checkpoints.restore(self.strategy.values)) is None:
            return False
        step = self.strategy.values.global_step()
        self._saves.note_restore(step)
        # Damaged ones would count as newer than the saves from now on.
        self.checkpoints.set_aside(after=step)
        self.print_line(lines.resume_line(step, self.last_step, path))
        return True

    def _has_saved(self, step: int, path: Path, is_delta: bool) -> None:
        self.print_line(lines.save_line(step, self.last_step, path))
        for hook in self.hooks if is_delta else []:
            hook.after_delta(path)

    def _close(self, error: BaseException | None) -> None:
        # Errors after which a retry may help; tasks that wait for the next chief do so then.
        self.strategy.is_interrupted = self.interrupted or isinstance(error, (ClusterError, NoWorkersError))
        with ExitStack() as closing:
            closing.callback(self._resizer.close, self.strategy)
            # All are called even if one raises; the last one first.
            for close in (self.strategy.stop, self.summaries.close, *(hook.close for hook in reversed(self.hooks))):
                closing.callback(close)


class RunLength:
    """Lets a run be as long as the hooks allow, and not much longer than a second."""

    def __init__(self) -> None:
        self._longest = _FIRST_STEPS
        #: Steps and seconds of the last runs; those of earlier ones count less and less.
        self._steps = self._seconds = 0.0

    def fewest(self, steps: Iterable[int | None], *, after: int = 0) -> int:
        """The fewest steps that all hooks allow, None being any number, and at most a run's length after `after`."""
        return min([after + self._longest, *(each for each in steps if each is not None)])

    def observe(self, values: RunValues) -> None:
        """Learns from a run how long its steps take."""
        if values.warming_up or values.seconds <= 0:
            return
        # A single run says little: its steps may have been done before they were requested, and those of hundreds of
        # workers that began together end together. One in which all was suspended says no more, however long it took.
        seconds = min(values.seconds, _REMEMBERED_SECS)
        weight = math.exp(-seconds / _REMEMBERED_SECS)
        self._steps = weight * self._steps + values.num_steps * seconds / values.seconds
        self._seconds = weight * self._seconds + seconds
        in_time = max(1, int(self._steps / self._seconds * _LONGEST_SECS))
        self._longest = min(in_time, _GROWTH * self._longest)
