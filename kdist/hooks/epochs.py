"""Epochs of an exact number of steps: Keras's `History`, and validation at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from kdist.console import lines
from kdist.data.epoch_lengths import EpochLengths
from kdist.errors import ConfigError, TaskError
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.hooks.metrics_recorder import MetricsRecorder
from kdist.log import warn
from kdist.run.metrics_file import Epoch, epochs_of
from kdist.run.resizes import Resize

if TYPE_CHECKING:
    from kdist.data.splits import Passes
    from kdist.hooks.keras_callbacks import Callbacks
    from kdist.model.metrics import MetricTotals
    from kdist.run.statistics import BestValues

#: Why a session ends after its last pass.
EPOCHS = "epochs"


@dataclass(eq=False)
class EpochRecorder(Hook):
    """Fills a Keras `History` with the loss and metrics of each epoch, and validates.

    Args:
        history: filled as by `keras.Model.fit`: `history.epoch` and `history.history`, validation under `val_`.
        callbacks: include the history.
        lengths: of the epochs; without it, and without `passes`, the whole run is one epoch.
        passes: of data of unknown length, with which an epoch ends at the latest.
        epochs: how many, counted from 0; None for any number.
        first_step, first_epoch: the global step at which epoch `first_epoch` starts.
        run_began_at: the global step after which the history of a resumed run begins.
        validate: returns the validation loss and metrics of a session's present parameters; None for no validation.
        resumes: whether the history begins with the epochs of the run that the session resumes.
        validation_freq: validate every this many epochs, or in these epochs (from 1). The end is always validated.
        validation_every_steps: also validate at multiples of this step.

    Attributes:
        train_logs: loss and metrics of the last epoch, or of the part of it that was trained.
        num_steps: the number of steps in `train_logs`.
        validation_logs: loss and metrics of the last validation.
    """

    history: keras.callbacks.History
    callbacks: Callbacks
    _: KW_ONLY
    lengths: EpochLengths | None
    passes: Passes | None = None
    epochs: int | None = None
    first_step: int = 0
    first_epoch: int = 0
    run_began_at: int = 0
    validate: Callable[[Session], Mapping[str, float]] | None
    best: BestValues
    metrics: MetricsRecorder
    resumes: bool = False
    validation_freq: int | Collection[int] = 1
    validation_every_steps: int | None = None
    prints_epochs: bool = False
    train_logs: dict[str, float] = field(default_factory=dict, init=False)
    num_steps: int = field(default=0, init=False)
    validation_logs: dict[str, float] = field(default_factory=dict, init=False)
    _finished: list[Epoch] = field(default_factory=list, init=False)
    #: Those of the last epoch, without what callbacks have added.
    _epoch_logs: dict[str, float] = field(default_factory=dict, init=False)
    _has_begun: bool = field(default=False, init=False)

    def after_create_session(self, session: Session) -> None:
        self._pass_began = session.global_step
        if self.passes is not None and self.passes.steps_per_epoch:
            # The pass of a resumed run began before.
            self._pass_began -= self.passes.num_read
        self._epoch = self._epoch_at(session.global_step)
        self._totals: MetricTotals | None = None
        #: Totals of earlier epochs, of metrics that are not reset.
        self._kept: MetricTotals | None = None
        self._steps_in_totals = self._steps_in_batch = 0
        self._validated_step: int | None = None
        self._num_empty_passes = 0
        self.best.forget_after(session.global_step)
        if self.passes is not None and self._is_past_last(self._epoch):
            session.request_stop(EPOCHS)
        self.metrics.epoch_of = lambda step: self._epoch_at(max(step - 1, self.first_step))
        self.callbacks.begin(session, self._epoch)
        if self._has_begun:
            # Training repeats the others.
            self._set_finished([epoch for epoch in self._finished if epoch.step <= session.global_step])
        elif self.resumes:
            self._continue_history(session)
        self._has_begun = True

    def before_run(self, context: RunContext) -> None:
        if self.callbacks.wants_batches and not self._steps_in_batch:
            self.callbacks.begin_batch(context.session, self._batch_at(context.global_step))

    def after_run(self, context: RunContext, values: RunValues) -> None:
        earlier = self._totals or self._kept
        self._totals = values.totals if earlier is None else earlier + values.totals
        self._steps_in_totals += values.num_steps
        step = values.global_step
        self._steps_in_batch += values.num_steps
        if self._batch_at(step) % self.callbacks.steps_per_batch == 0:
            self._end_batch(context.session)
        # A run never passes the end of an epoch, but repeated steps of a lost worker may.
        if (following := self._epoch_at(step)) > self._epoch:
            if self.passes is not None and self._is_past_last(following):
                context.session.request_stop(EPOCHS)
            self._finish_epoch(context.session, is_complete=True)
            self._epoch = following
        elif self.validation_every_steps and step % self.validation_every_steps == 0:
            self._run_validation(context.session)

    def after_resize(self, session: Session, resize: Resize) -> None:
        self.lengths = session.spec.epoch_lengths

    def _end_batch(self, session: Session) -> None:
        """Ends a batch of the callbacks: as many steps as `compile(steps_per_execution=...)` says, or the rest."""
        if self.callbacks.wants_batches and self._steps_in_batch and self._totals is not None:
            begin = self._batch_at(session.global_step - self._steps_in_batch)
            last = begin - begin % self.callbacks.steps_per_batch + self.callbacks.steps_per_batch - 1
            self.callbacks.end_batch(session, last, self._totals.logs)
        self._steps_in_batch = 0

    def while_waiting(self, session: Session) -> None:
        """Ends an epoch if the reason is that its pass has ended."""
        if self.passes is None or not self.passes.pass_has_ended():
            return
        # In a run that was resumed at the end of a pass there was nothing left of it.
        self._num_empty_passes = self._num_empty_passes + 1 if session.global_step == self._pass_began else 0
        if self._num_empty_passes > 1:
            raise TaskError("a worker", ValueError("the dataset has not a single batch"))
        following = self.passes.epoch_after(session.global_step - self._pass_began) + self.first_epoch
        is_last = self._is_past_last(following)
        if not is_last and self.passes.is_only_pass:
            warn(
                f"the data can be read once, and ended in epoch {self._epoch + 1} of {self.epochs} at step "
                f"{session.global_step}; training ends with it"
            )
            session.request_stop("the end of the data")
        elif is_last:
            session.request_stop(EPOCHS)
        self._finish_epoch(session, is_complete=True)
        if not session.should_stop():
            self.passes.begin_pass()
            self._epoch, self._pass_began = following, session.global_step

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        # Also of values that another hook has restored.
        self.validation_logs, self._validated_step = dict(logs), session.global_step

    def end(self, session: Session) -> None:
        if self._totals is not None:
            self._finish_epoch(session, is_complete=False)
        elif self._validated_step != session.global_step:
            self._run_validation(session)
        self.callbacks.end(session, self._epoch_logs)
        if self.callbacks.have_changed_weights and not session.interrupted:
            # As restore_best_weights does: what is said last is of the model that is saved.
            self._validated_step = None
            if not self._run_validation(session):
                warn(
                    f"a callback has changed the weights after step {session.global_step}; without validation_data, "
                    "loss and metrics are those of training before that"
                )

    def due_in(self, step: int) -> int | None:
        due = []
        if self.lengths is not None:
            due.append(self.lengths.begin_of(self.lengths.epoch_at(step) + 1) - step)
        elif self.passes is not None and self.passes.steps_per_epoch:
            due.append(self.passes.steps_per_epoch - self._batch_at(step))
        if self.callbacks.wants_batches:
            due.append(self.callbacks.steps_per_batch - self._batch_at(step) % self.callbacks.steps_per_batch)
        if self.validation_every_steps:
            due.append(self.validation_every_steps - step % self.validation_every_steps)
        return min(due, default=None)

    def idle_in(self, step: int) -> int | None:
        looks_at_values = self.validate is not None or self.callbacks.looks_at_model
        return self.due_in(step) if looks_at_values else None

    @property
    def _have_an_end(self) -> bool:
        """True if epochs have a known length, or are passes."""
        return self.lengths is not None or self.passes is not None

    def _is_past_last(self, epoch: int) -> bool:
        return self.epochs is not None and epoch >= self.epochs

    def _epoch_at(self, step: int) -> int:
        if self.passes is not None:
            return self.first_epoch + self.passes.epoch_at(step - self._pass_began)
        return self.first_epoch if self.lengths is None else self.first_epoch + self.lengths.epoch_at(step)

    def _batch_at(self, step: int) -> int:
        if self.passes is not None:
            in_pass = step - self._pass_began
            return in_pass % self.passes.steps_per_epoch if self.passes.steps_per_epoch else in_pass
        return step - self.first_step if self.lengths is None else self.lengths.batch_at(step)

    def _is_validation_epoch(self) -> bool:
        epoch, freq = self._epoch + 1, self.validation_freq
        return epoch % freq == 0 if isinstance(freq, int) else epoch in freq

    def _warn_of_end_of_data(self, step: int) -> None:
        """Warns, as Keras does, of an epoch that the data has ended at a step."""
        length = wanted = 0
        if self.passes is not None:
            length, wanted = self._batch_at(step), self.passes.steps_per_epoch or 0
        elif self.lengths is not None and self.lengths.steps_per_epoch != self.lengths.steps_per_pass:
            length, wanted = self.lengths.length_of(self._epoch - self.first_epoch), self.lengths.steps_per_epoch
        if 0 < length < wanted:
            warn(
                f"your input ran out of data in epoch {self._epoch + 1}, after {length} of {wanted} steps "
                "(steps_per_epoch); for epochs of one length, repeat it: dataset.repeat()"
            )

    def _finish_epoch(self, session: Session, *, is_complete: bool) -> None:
        """Reports the steps since the last epoch, if any; the last ones of a run are always validated."""
        if self._totals is None:
            return
        if is_complete:
            self._warn_of_end_of_data(session.global_step)
        self._end_batch(session)
        self.train_logs = session.training_logs(self._totals)
        self._kept, self._totals = self._totals.reset(), None
        self.num_steps, self._steps_in_totals = self._steps_in_totals, 0
        logs = dict(self.train_logs)
        session.summaries.epoch("train", logs, session.global_step)
        if (not is_complete or self._is_validation_epoch()) and self._run_validation(session):
            logs |= {f"val_{name}": value for name, value in self.validation_logs.items()}
        if self._have_an_end and self._finished and self._finished[-1].epoch == self._epoch:
            # The run before this one was stopped in the middle of it.
            self._set_finished(self._finished[:-1])
        self._epoch_logs = dict(logs)
        lengths = {name: len(values) for name, values in self.history.history.items()}
        self.callbacks.end_epoch(session, self._epoch, logs)
        # With what callbacks have added.
        told = {n: values[-1] for n, values in self.history.history.items() if len(values) > lengths.get(n, 0)}
        self._finished.append(Epoch(session.global_step, self._epoch, told))
        self.metrics.end_epoch(session, self._epoch, told)
        if self.prints_epochs and is_complete:
            session.print_line(lines.epoch_line(self._epoch + 1, self.epochs, session.global_step, {**logs, **told}))

    def _continue_history(self, session: Session) -> None:
        """Begins with the epochs of the run that is resumed."""
        earlier = epochs_of(
            self.metrics.earlier_rows,
            after=self.run_began_at,
            until=session.global_step,
            are_complete=self._have_an_end,
            with_learning_rate=self.callbacks.logs_learning_rate,
        )
        if earlier:
            self._set_finished(earlier)
            self.train_logs = {n: v for n, v in earlier[-1].logs.items() if not n.startswith("val_")}
            self.num_steps = earlier[-1].step - (earlier[-2].step if len(earlier) > 1 else self.run_began_at)

    def _set_finished(self, epochs: Sequence[Epoch]) -> None:
        self._finished = list(epochs)
        fill(self.history, self._finished)

    def _run_validation(self, session: Session) -> bool:
        if self.validate is None or session.interrupted:
            return False
        if self._validated_step != session.global_step:
            logs = dict(self.validate(session))
            # A callback that changes them in a validation would change them again in another one.
            self.callbacks.have_changed_weights = False
            if session.interrupted:
                # It has not used all of the data.
                return False
            self.best.add(session.global_step, logs)
            session.publish_validation(logs)
            session.summaries.epoch("validation", logs, session.global_step)
        return True


def fill(history: keras.callbacks.History, epochs: Iterable[Epoch]) -> None:
    """Lets a history have these epochs, and no others."""
    history.epoch, history.history = [], {}
    for epoch in epochs:
        history.epoch.append(epoch.epoch)
        for name, value in epoch.logs.items():
            history.history.setdefault(name, []).append(value)


def last_step_of(
    steps: int | None,
    epochs: int | None,
    lengths: EpochLengths | None,
    first_epoch: int,
    *,
    by_passes: bool = False,
) -> int | None:
    """The global step at which `fit` stops: `steps`, or the end of the epoch before `epochs`.

    None if that is not known: an epoch is a pass over data of unknown length, or the only one does not end.

    Raises:
        ConfigError: nothing is left to do, or several epochs have an unknown length.
    """
    if steps is not None or epochs is None:
        return steps
    if epochs <= first_epoch:
        raise ConfigError(f"epochs={epochs}: must be more than initial_epoch={first_epoch}")
    if lengths is None:
        if epochs - first_epoch == 1 or by_passes:
            return None
        raise ConfigError(
            f"epochs={epochs}: the length of the data is not known; give steps (train.steps) or steps_per_epoch"
        )
    return lengths.begin_of(epochs - first_epoch)
