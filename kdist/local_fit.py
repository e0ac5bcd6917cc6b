"""`LocalFit`: one `fit` of a trainer in this process, from its arguments to `result.json`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import keras

from kdist import console
from kdist.best_values import BestValues
from kdist.callbacks import Callbacks, as_hooks
from kdist.cluster import isolate
from kdist.cluster.local import log_path
from kdist.data import is_whole
from kdist.epochs import EpochRecorder, last_step_of
from kdist.errors import ConfigError
from kdist.evaluator import Evaluator
from kdist.fit_arguments import FitArguments
from kdist.hooks import CheckpointSaver, Hook, Progress, StopAtStep
from kdist.hparams import final_metrics
from kdist.parameters.local import write_to_model
from kdist.result import Result, describe
from kdist.session import TrainSession
from kdist.signals import StopSignals
from kdist.validation import Validator
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.trainer import Trainer


class LocalFit:
    """Makes the session of one `fit`, and writes what came of it.

    Args:
        trainer: whose model is trained; it gets the values and the result.
        arguments: those of `fit`.
        history: gets the epochs.
    """

    def __init__(self, trainer: Trainer, arguments: FitArguments, history: keras.callbacks.History) -> None:
        self._trainer = trainer
        self._arguments = arguments
        self._history = history

    @contextmanager
    def session(self) -> Iterator[TrainSession]:
        """The session, started; at its end the trainer has what came of it."""
        trainer, arguments = self._trainer, self._arguments
        session = self._make_session()
        recorder, validate, print_line = self._recorder, self._validate, session.print_line
        self._print_begin(print_line)
        started = time.monotonic()
        signals = StopSignals(session, trainer.grace_secs, trainer.stop_signals)
        try:
            with signals, session:
                trainer.files.write_plan(session.strategy.plan)
                if arguments.tells_all:
                    self._tell_all(session)
                trainer.files.describe(session.summaries, trainer.model, session.global_step)
                yield session
                write_to_model(trainer.model, session.read())
            if trainer.model.optimizer.use_ema and not session.interrupted:
                # As Keras does at the end of fit: the model gets the averages, and that is what is reported.
                trainer.model.optimizer.finalize_variable_values(trainer.model.trainable_variables)
                recorder.validation_logs = validate.evaluate()
                self._best.add(session.global_step, recorder.validation_logs)
            if not session.interrupted:
                trainer.files.write_model(trainer.model)
            trainer.resume = None
        except BaseException as error:
            if session.is_started:
                # The model has nothing of it: another fit goes on from the last checkpoint.
                trainer.resume = "auto"
            self._finish("failed", session, recorder, started, error)
            raise
        self._finish("preempted" if session.interrupted else "done", session, recorder, started)
        if session.interrupted:
            newest = session.checkpoints.newest()
            print_line(
                f"kdist: stopped by {session.stopped_by} at step {session.global_step}; last checkpoint: {newest}"
            )
            signals.raise_received()
        logs = recorder.validation_logs or recorder.train_logs
        for line in console.last_lines(session, logs, time.monotonic() - started):
            print_line(line)

    def _make_session(self) -> TrainSession:
        trainer, arguments, history = self._trainer, self._arguments, self._history
        data = arguments.training_data(trainer.seed)
        steps_per_epoch = arguments.steps_per_epoch
        if steps_per_epoch is None and data.steps_per_epoch is not None:
            steps_per_epoch = math.ceil(data.steps_per_epoch / trainer.make_strategy().batches_per_step)
        checkpoints = trainer.files.checkpoints()
        resumes = trainer.resume in ("auto", "must") and checkpoints.newest() is not None
        # A resumed run counts from its beginning; any other from the model as it is.
        first_step = 0 if resumes else int(trainer.model.optimizer.iterations)
        first_epoch = 0 if resumes else arguments.initial_epoch
        earlier = trainer.files.read_result().get("best") if resumes else None
        self._best = BestValues(trainer.model, earlier, checkpoints.steps()[-1] if resumes else 0)
        last_step = last_step_of(arguments.steps, arguments.epochs, steps_per_epoch, first_step, first_epoch)
        others, hooks = as_hooks(arguments.callbacks, trainer.hooks)
        hooks += self._progress()
        callbacks = Callbacks(
            [*others, history], trainer.model, epochs=arguments.epochs, steps=arguments.steps_per_epoch
        )
        self._validate = validate = Validator(trainer.model, arguments, callbacks)
        has_evaluator = trainer.shape.has_evaluator
        if waiting := [hook for hook in hooks if hook.needs_validation and (has_evaluator or not validate.has_data)]:
            why = "with an evaluator the chief validates at the end only" if has_evaluator else "give validation_data"
            raise ConfigError(f"{type(waiting[0]).__name__}: needs validation data during training; {why}")
        self._recorder = recorder = EpochRecorder(
            history,
            callbacks,
            steps_per_epoch=steps_per_epoch,
            first_step=first_step,
            first_epoch=first_epoch,
            validate=validate if validate.has_data else None,
            best=self._best,
            # During training, validating is what an evaluator is for.
            validation_freq=() if has_evaluator else arguments.validation_freq,
            validation_every_steps=None if has_evaluator else arguments.validation_every_steps,
        )
        return TrainSession(
            trainer.make_strategy,
            trainer.program(data, arguments.batch_size, last_step),
            [*_in_order(hooks, recorder, has_last_step=last_step is not None), *self._evaluator()],
            checkpoints=checkpoints,
            summaries=trainer.files.summaries(),
            last_step=last_step,
            resume=trainer.resume,
            max_restarts=trainer.max_restarts,
            # Tasks that others started are theirs to start again.
            may_restart_tasks=trainer.membership is None,
            print_line=console.print_nothing if arguments.is_quiet else console.print_line,
        )

    def _progress(self) -> list[Hook]:
        """The live line, if it is asked for and not among the hooks."""
        is_there = any(isinstance(hook, Progress) for hook in self._trainer.hooks)
        return [Progress()] if self._arguments.shows_progress and not is_there else []

    def _evaluator(self) -> list[Hook]:
        """The evaluator, if the cluster has one. It comes last: it waits for what others have saved."""
        trainer, arguments = self._trainer, self._arguments
        if not trainer.shape.has_evaluator:
            return []
        if (data := arguments.validation_data) is None:
            raise ConfigError(f"cluster={trainer.shape}: an evaluator needs validation data; give validation_data")
        x, y, sample_weight = (data, None, None) if is_whole(data) else keras.utils.unpack_x_y_sample_weight(data)
        given = FitArguments(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=arguments.validation_batch_size or arguments.batch_size,
            shuffle=False,
            validation_data=data,
            validation_steps=arguments.validation_steps,
            validate_with_ema=arguments.validate_with_ema,
        )
        config = trainer.cluster_config
        return [
            Evaluator(
                trainer.build_model,
                given,
                trainer.files.logs,
                self._best,
                max_restarts=config.max_worker_restarts,
                last_secs=config.step_timeout,
            )
        ]

    def _print_begin(self, print_line: Callable[[str], None]) -> None:
        trainer = self._trainer
        print_line(f"kdist {__version__} | {trainer.name} | {trainer.strategy} on {trainer.shape}")
        print_line(f"run dir   {trainer.files}      tensorboard --logdir {trainer.files.tensorboard_logdir}")
        if trainer.membership is not None or not trainer.shape.is_local:
            print_line(isolate.network_line())

    def _tell_all(self, session: TrainSession) -> None:
        logs = self._trainer.files.logs
        pids = session.strategy.pids.items()
        for line in console.task_lines((str(task), pid, log_path(logs, task)) for task, pid in pids):
            session.print_line(line)
        if session.strategy.plan is not None:
            session.print_line(session.strategy.plan.table().rstrip())

    def _finish(
        self,
        status: str,
        session: TrainSession,
        recorder: EpochRecorder,
        started: float,
        error: BaseException | None = None,
    ) -> None:
        """Writes the account of a session that has ended."""
        trainer, account = self._trainer, session.account
        trainer.result = Result(
            status=status,
            global_step=session.global_step,
            stopped_by=session.stopped_by,
            strategy=trainer.strategy,
            cluster=str(trainer.shape),
            workers=session.strategy.num_replicas,
            steps_per_second=account.steps_per_second,
            examples_per_second=account.examples_per_second,
            seconds=time.monotonic() - started,
            examples=account.num_examples,
            metrics={"train": recorder.train_logs, "validation": recorder.validation_logs},
            best=self._best.as_dict(),
            gradients=account.gradients,
            restarts=session.restarts,
            extra_steps=account.extra_steps,
            error=None if error is None else describe(error),
        )
        trainer.files.write_result(trainer.result)
        if trainer.hparams:
            # The session's: what it could not write was said once.
            summaries = session.summaries
            metrics = final_metrics(trainer.result)
            summaries.hparams(trainer.hparams, metrics, began=time.time() - trainer.result.seconds, ok=status == "done")
            summaries.close()


def _in_order(hooks: Sequence[Hook], recorder: EpochRecorder, *, has_last_step: bool) -> list[Hook]:
    """The hooks, with savers last, so that what another hook raises comes before a save."""
    hooks = list(hooks)
    if has_last_step and not any(isinstance(hook, StopAtStep) and hook.follows_fit for hook in hooks):
        hooks.append(StopAtStep())
    savers = [hook for hook in hooks if isinstance(hook, CheckpointSaver)]
    return [*(hook for hook in hooks if hook not in savers), recorder, *savers]
