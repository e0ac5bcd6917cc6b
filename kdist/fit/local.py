"""Runs the training loop of a fit in this process, from its arguments to `result.json`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import keras
import numpy as np

from kdist._compat.keras import main_optimizer
from kdist.cluster.local import log_path
from kdist.cluster.network import isolate
from kdist.cluster.spec import CHIEF, ClusterShape
from kdist.config.hparams import of_run, sweep_of_job
from kdist.console import lines
from kdist.data.base import TrainingData
from kdist.errors import ConfigError
from kdist.evaluation.evaluate import Validator
from kdist.evaluation.evaluator import Evaluator
from kdist.fit.request import Fit, FitOutcome
from kdist.fit.signals import StopSignals
from kdist.forks import children_end_here
from kdist.hooks import CheckpointSaver, Hook, NanTensor, Progress, StopAtStep
from kdist.hooks.base import Session
from kdist.hooks.data_position import hooks_of
from kdist.hooks.epochs import EPOCHS, EpochRecorder, last_step_of
from kdist.hooks.keras_callbacks import Callbacks, as_hooks
from kdist.hooks.metrics_recorder import MetricsRecorder
from kdist.hooks.warm_start import WarmStart
from kdist.log import warn
from kdist.model.names import DROPPED_STEPS
from kdist.model.state import finalize_ema, num_bytes, write_to_model
from kdist.run.resizes import Resize
from kdist.run.result import Result, final_metrics
from kdist.run.statistics import BestValues
from kdist.session import Resized, TrainSession
from kdist.strategies.base import Strategy
from kdist.strategies.on_servers import ServersStrategy


def run_here(fit: Fit) -> FitOutcome:
    """Runs the training loop of a fit to its end; what ended it too early is in the outcome."""
    local = LocalFit(fit)
    try:
        with local.session() as session:
            while not session.should_stop():
                session.run()
    except BaseException as error:  # noqa: BLE001 - in the outcome, and raised by the caller
        return local.outcome(error)
    return local.outcome()


class LocalFit(Hook):
    """Makes the session of a fit, is the last of its hooks, which gives the model its values, and writes its result."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._model = fit.source.model
        self._history = keras.callbacks.History()
        self._result = Result()
        self._session: TrainSession | None = None
        self._tried: Strategy | None = None
        self._resume = fit.resume
        self._overflowed_steps: int | None = None
        #: Of the cluster, by now.
        self._shape = str(fit.place.shape)

    def outcome(self, error: BaseException | None = None) -> FitOutcome:
        """The outcome of the fit; `error` is what its session raised."""
        left = self._fit if self._result.status and self._fit.keeps_model_on_servers else None
        return FitOutcome(self._result, self._resume, self._history, error, left)

    @contextmanager
    def session(self) -> Iterator[TrainSession]:
        """The session, started; when it has ended, `outcome` is complete."""
        try:
            yield from self._run()
        finally:
            if self._tried is not None:
                self._tried.stop()

    def _run(self) -> Iterator[TrainSession]:
        fit, model = self._fit, self._model
        session = self._session = self._make_session()
        print_line = session.print_line
        self._print_begin(session)
        started = time.monotonic()
        signals = StopSignals(session, fit.grace_secs, fit.config.run.stop_signals)
        try:
            for hook in session.hooks:
                hook.before_fit(fit.files.path, fit.result(status="running"))
            with signals, session, children_end_here():
                fit.files.write_plan(session.strategy.plan)
                self._print_tasks(session)
                fit.files.describe(session.summaries, model, session.global_step)
                yield session
            if fit.keeps_model_on_servers:
                print_line(lines.stays_line(num_bytes(model), fit.config.run.export_max_bytes))
            elif not session.interrupted:
                self._finish_model(session)
            # What the model did not get is in the last checkpoint.
            self._resume = "auto" if fit.keeps_model_on_servers else None
        except BaseException as error:
            if session.is_started:
                # The model did not get the values: another fit continues from the last checkpoint.
                self._resume = "auto"
            self._finish("failed", session, started, error)
            raise
        self._finish("preempted" if session.interrupted else "done", session, started)
        if session.interrupted:
            newest = session.checkpoints.newest()
            print_line(
                f"kdist: stopped by {session.stopped_by} at step {session.global_step}; last checkpoint: {newest}"
            )
            # A sweep says how to finish it.
            if newest is not None and sweep_of_job() is None:
                print_line(lines.how_to_resume(str(fit.files), None if fit.began is None else sys.argv[1:]))
            signals.raise_received()
        self._print_end(session, time.monotonic() - (started if fit.began is None else fit.began))

    def _resized(self, session: TrainSession, shape: ClusterShape) -> Resized:
        fit, train, spec = self._fit, self._fit.config.train, session.spec
        # Hooks may not have seen the last steps yet; asynchronous ones have one batch each, whatever the shape.
        step = session.global_step if session.is_asynchronous else session.strategy.values.global_step()
        lengths, last_step = fit.lengths_on(shape, spec, step, session.strategy.batches_per_step), session.last_step
        if lengths is not None and lengths is not spec.epoch_lengths:
            spec = replace(spec, epoch_lengths=lengths, count=replace(spec.count, begin=lengths.first_step))
            last_step = last_step_of(train.steps, train.epochs, lengths, fit.count.first_epoch)
        return Resized(fit.resized(shape).make_strategy, spec, last_step)

    def after_resize(self, session: Session, resize: Resize) -> None:
        """Shows where the tasks and values are by now."""
        self._shape = resize.after
        self._fit.files.write_plan(session.strategy.plan)
        if self._session is not None:
            self._print_tasks(self._session)

    def end(self, session: Session) -> None:
        """Gives the model the trained values; a model that is too large has them in a checkpoint."""
        if self._stays_on_servers():
            if not any(isinstance(hook, CheckpointSaver) for hook in self._hooks):
                session.save(keep=1)
            return

        def take(values: Mapping[str, np.ndarray]) -> None:
            write_to_model(self._model, values)
            if DROPPED_STEPS in values:
                self._overflowed_steps = int(values[DROPPED_STEPS])

        session.read_into(take)

    def _stays_on_servers(self) -> bool:
        """True if the model is too large for this process, with the rows that its dynamic tables have by now."""
        if self._session is not None and self._session.is_started:
            self._session.strategy.values.count_rows()
        return self._fit.keeps_model_on_servers

    def _finish_model(self, session: TrainSession) -> None:
        """Writes `model.keras`."""
        if main_optimizer(self._model).use_ema:
            # As Keras does at the end of fit: the model gets the averages, and they are reported.
            finalize_ema(self._model)
            self._recorder.validation_logs = self._validate.evaluate()
            self._best.add(session.global_step, self._recorder.validation_logs)
        self._fit.files.write_model(self._model)

    def _make_session(self) -> TrainSession:
        fit, train, model = self._fit, self._fit.config.train, self._model
        data, make_strategy = self._data_and_strategy()
        lengths = fit.epoch_lengths(data)
        resumes = fit.resumes
        # A resumed run counts from its beginning; the checkpoint has not been read yet.
        first_epoch = fit.count.first_epoch
        earlier = fit.files.read_result().get("best") if resumes else None
        if train.steps is not None and 0 < train.steps <= fit.model_step:
            raise ConfigError(
                f"steps={train.steps}: the model has had {fit.model_step} updates; steps is the global step to stop at"
            )
        self._best = BestValues(model, earlier)
        by_passes = data.passes is not None
        last_step = last_step_of(train.steps, train.epochs, lengths, first_epoch, by_passes=by_passes)
        others, hooks = as_hooks(fit.data.callbacks, fit.hooks)
        if fit.config.run.verbose in (1, "auto") and not any(isinstance(hook, Progress) for hook in hooks):
            hooks = [*hooks, Progress()]
        listed = [*others, self._history]
        steps = train.steps_per_epoch or (None if lengths is None else lengths.length_of(0))
        callbacks = Callbacks(listed, model, epochs=train.epochs, steps=steps)
        self._validate = validate = Validator(model, fit.validation, callbacks, self._stays_on_servers)
        has_evaluator = fit.place.shape.has_evaluator
        if waiting := [hook for hook in hooks if hook.needs_validation and (has_evaluator or not validate.has_data)]:
            why = "with an evaluator the chief validates at the end only" if has_evaluator else "give validation_data"
            raise ConfigError(f"{type(waiting[0]).__name__}: needs validation data during training; {why}")
        # It comes first: it has seen a run when the others report.
        metrics = MetricsRecorder(fit.files.metrics())
        self._recorder = recorder = EpochRecorder(
            self._history,
            callbacks,
            lengths=lengths,
            passes=data.passes,
            epochs=train.epochs,
            first_step=fit.count.begin if lengths is None else lengths.first_step,
            run_began_at=fit.count.origin,
            first_epoch=first_epoch,
            validate=validate if validate.has_data else None,
            best=self._best,
            metrics=metrics,
            resumes=resumes,
            # During training, validating is what an evaluator is for.
            validation_freq=() if has_evaluator else fit.data.validation_freq,
            validation_every_steps=None if has_evaluator else train.validation_every_steps,
            prints_epochs=train.steps is None,
        )
        self._hooks = _in_order(hooks, [recorder, self], has_last_step=last_step is not None)
        spec = fit.training_spec(data, last_step=last_step, epoch_lengths=lengths)
        if fit.hparams:
            # 0.1, and not 0.10000000149.
            rate = float(str(np.float32(spec.learning_rate(0))))
            self._hparams = of_run(fit.strategy_name, str(fit.place.shape), rate, fit.hparams)
        source = fit.config.run.start_from
        warm_start = [WarmStart(source)] if source is not None and not resumes and fit.resume is not None else []
        of_data = hooks_of(data.splits, resumes=resumes and not fit.begins_anew)
        return TrainSession(
            make_strategy,
            replace(spec, stays_on_servers=self._stays_on_servers),
            [metrics, *warm_start, *of_data, *self._hooks, *self._evaluator()],
            checkpoints=fit.files.checkpoints(),
            summaries=fit.files.summaries(),
            last_step=last_step,
            resume=fit.resume,
            max_restarts=fit.config.train.max_restarts,
            # Separately started tasks are restarted by those who started them.
            may_restart_tasks=fit.place.membership is None,
            print_line=fit.print_line,
            resized=self._resized,
            requests=fit.requests,
            cluster=fit.config.cluster,
        )

    def _data_and_strategy(self) -> tuple[TrainingData, Callable[[], Strategy]]:
        """The data, and the function that makes the strategy.

        Data that the tasks may be unable to read is tried on one of them first; if that fails, this process reads it
        for all.
        """
        fit, make = self._fit, self._fit.make_strategy
        data = fit.training_data_of_checkpoint
        strategy = make() if data.is_untried else None
        if not isinstance(strategy, ServersStrategy):
            return data, make
        self._tried = strategy
        strategy.start_tasks(fit.files.logs, fit.grace_secs)
        if (why := strategy.why_unreadable(data, fit.config.train.batch_size)) is not None:
            data = fit.data_read_here()
            warn(f"the workers cannot read the data, so this process reads it for them: {why}")
        unused: list[Strategy] = [strategy]
        return data, lambda: unused.pop() if unused else make()

    def _evaluator(self) -> list[Hook]:
        """The evaluator, if the cluster has one. It comes last: it waits for what other hooks have saved."""
        fit, validation = self._fit, self._fit.validation
        if not fit.place.shape.has_evaluator:
            return []
        if validation.data is None:
            raise ConfigError(f"cluster={fit.place.shape}: an evaluator needs validation data; give validation_data")
        cluster = fit.config.cluster
        return [
            Evaluator(
                fit.source,
                validation,
                fit.files.logs,
                self._best,
                max_restarts=cluster.max_worker_restarts,
                last_secs=cluster.step_timeout,
            )
        ]

    def _print_begin(self, session: TrainSession) -> None:
        fit, shape = self._fit, self._fit.place.shape
        if fit.began is None:
            session.print_line(lines.start_line(fit.config.run.name, fit.strategy_name, str(shape)))
            session.print_line(lines.run_dir_line(str(fit.files), fit.files.path))
        is_first = not fit.num_fits and not fit.is_quiet
        has_servers = fit.place.membership is not None or not shape.is_local
        if is_first and has_servers and (line := isolate.network_line()) is not None:
            session.print_line(line)
        if session.last_step is None and all(
            hook.follows_fit for hook in session.hooks if isinstance(hook, StopAtStep)
        ):
            data = session.spec.data
            known = lines.ENDLESS_LINE if data.splits is None else lines.ARRIVING_LINE
            session.print_line(known if data.passes is None else lines.PASSES_LINE)

    def _print_tasks(self, session: TrainSession) -> None:
        """Prints the places of separately started tasks, now that all of them have come; with `verbose=3` all tasks."""
        membership = self._fit.place.membership
        if membership is not None:
            chief = {task: membership.spec.addresses[task] for task in [CHIEF] if membership.spec.chief}
            present = session.strategy.addresses or membership.spec.addresses
            for line in lines.member_lines({**chief, **present}, str(membership.task)):
                session.print_line(line)
        if self._fit.config.run.verbose != 3:
            return
        logs, pids = self._fit.files.logs, session.strategy.pids.items()
        for line in lines.task_lines((str(task), pid, log_path(logs, task)) for task, pid in pids):
            session.print_line(line)
        if session.strategy.plan is not None:
            session.print_line(session.strategy.plan.table().rstrip())

    def _print_end(self, session: TrainSession, seconds: float) -> None:
        recorder, step, last_step = self._recorder, session.global_step, session.last_step
        logs, over = recorder.train_logs, lines.over_steps(recorder.num_steps)
        if recorder.validation_logs:
            logs, over = recorder.validation_logs, "of validation"
        done = lines.done_line(step, last_step, logs, over, self._why_ended(session), seconds)
        # With asynchronous updates every gradient is accepted.
        by_worker = {} if session.is_asynchronous else session.statistics.gradients.by_worker
        for line in lines.last_lines(
            by_worker, session.restarts, session.statistics.extra_steps, self._overflowed_steps, done
        ):
            session.print_line(line)

    def _why_ended(self, session: TrainSession) -> str:
        train, last_step = self._fit.config.train, session.last_step
        is_at_end = last_step is not None and session.global_step >= last_step
        if session.stopped_by == EPOCHS or (session.stopped_by == "StopAtStep" and is_at_end):
            return f"epochs={train.epochs} done" if train.steps is None else f"steps={train.steps} done"
        return f"stopped by {session.stopped_by}"

    def _finish(self, status: str, session: TrainSession, started: float, error: BaseException | None = None) -> None:
        """Writes the result of a session that has ended."""
        fit, statistics, recorder = self._fit, session.statistics, self._recorder
        self._result = fit.result(
            error,
            status=status,
            cluster=self._shape,
            global_step=session.global_step,
            stopped_by=session.stopped_by,
            workers=session.strategy.num_replicas,
            steps_per_second=statistics.steps_per_second,
            examples_per_second=statistics.examples_per_second,
            seconds=time.monotonic() - started,
            examples=statistics.num_examples,
            metrics={"train": recorder.train_logs, "validation": recorder.validation_logs},
            best=self._best.by_name,
            gradients=statistics.gradients,
            restarts=session.restarts,
            extra_steps=statistics.extra_steps,
            overflowed_steps=self._overflowed_steps,
            resizes=[resize.to_dict() for resize in session.resizes],
        )
        fit.files.write_result(self._result)
        if fit.hparams:
            # The session's: a failure to write was reported once.
            summaries, metrics = session.summaries, final_metrics(self._result)
            began = time.time() - self._result.seconds
            # Trials of different sweeps have the same numbers. TensorBoard shows the first letters only.
            name = " in ".join(reversed(fit.files.path.absolute().parts[-2:]))
            summaries.hparams(name, self._hparams, metrics, began=began, ok=status == "done")
            summaries.close()
        for hook in session.hooks:
            hook.after_fit(self._result)
        if error is None:
            fit.files.upload()


def _in_order(hooks: Sequence[Hook], last: Sequence[Hook], *, has_last_step: bool) -> list[Hook]:
    """The hooks of the user, then `last`, then savers, so that an error of another hook comes before a save.

    Among the user's, hooks that look for NaN come first, then hooks that add to the logs, which the others report.
    """
    hooks = list(hooks)
    if has_last_step and not any(isinstance(hook, StopAtStep) and hook.follows_fit for hook in hooks):
        hooks.append(StopAtStep())

    def rank(hook: Hook) -> int:
        return 0 if isinstance(hook, NanTensor) else 1 if type(hook).extra_logs is not Hook.extra_logs else 2

    savers = [hook for hook in hooks if isinstance(hook, CheckpointSaver)]
    return [*sorted((hook for hook in hooks if hook not in savers), key=rank), *last, *savers]
