"""Epochs of an exact number of steps: Keras's `History`, and validation at the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from kdist.console.warn import warn
from kdist.errors import ConfigError, TaskError
from kdist.hooks.base import Hook, RunContext, RunValues, Session

if TYPE_CHECKING:
    from kdist.data.splits import Passes
    from kdist.hooks.keras_callbacks import Callbacks
    from kdist.model.metrics import MetricTotals
    from kdist.run.best_values import BestValues

#: Why a session ends after its last pass.
_EPOCHS = "epochs"


@dataclass(eq=False)
class EpochRecorder(Hook):
    """Fills a Keras `History` with the loss and metrics of each epoch, and validates.

    Args:
        history: filled as by `keras.Model.fit`: `history.epoch` and `history.history`, validation under `val_`.
        callbacks: called at the events of training; includes the history.
        steps_per_epoch: steps per epoch; without it, and without `passes`, the whole run is one epoch.
        passes: each is an epoch.
        epochs: how many, counted from 0; None for any number.
        first_step, first_epoch: the global step at which epoch `first_epoch` starts.
        validate: returns the validation loss and metrics of a session's present parameters; None for no validation.
        best: gets the validation values.
        validation_freq: validate every this many epochs, or in these epochs (from 1). The end is always validated.
        validation_every_steps: also validate at multiples of this step.
    """

    history: keras.callbacks.History
    callbacks: Callbacks
    _: KW_ONLY
    steps_per_epoch: int | None
    passes: Passes | None = None
    epochs: int | None = None
    first_step: int = 0
    first_epoch: int = 0
    validate: Callable[[Session], Mapping[str, float]] | None
    best: BestValues
    validation_freq: int | Collection[int] = 1
    validation_every_steps: int | None = None
    train_logs: dict[str, float] = field(default_factory=dict, init=False)
    validation_logs: dict[str, float] = field(default_factory=dict, init=False)
    _finished: list[tuple[int, dict[str, float]]] = field(default_factory=list, init=False)
    _has_begun: bool = field(default=False, init=False)

    def after_create_session(self, session: Session) -> None:
        self._epoch = self._epoch_at(session.global_step)
        self._totals: MetricTotals | None = None
        self._validated_step: int | None = None
        self._num_empty_passes = 0
        if self.passes is not None and self._is_past_last(self._epoch):
            session.request_stop(_EPOCHS)
        if not self._has_begun:
            self._has_begun = True
            self.callbacks.begin(session, self._epoch)
        else:
            self.callbacks.begin_again(session, self._epoch)
            self._forget_later_epochs()

    def before_run(self, context: RunContext) -> None:
        if self.callbacks.wants_batches:
            self.callbacks.begin_batch(context.session, self._batch_at(context.global_step))

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._totals = values.totals if self._totals is None else self._totals + values.totals
        step = values.global_step
        if self.callbacks.wants_batches:
            self.callbacks.end_batch(context.session, self._batch_at(context.global_step), self._totals.logs)
        # A run never passes the end of an epoch, but repeated steps of a lost worker may.
        if self._epoch_at(step) > self._epoch:
            self._finish_epoch(context.session, validate=self._is_validation_epoch())
            self._epoch = self._epoch_at(step)
        elif self.validation_every_steps and step % self.validation_every_steps == 0:
            self._run_validation(context.session)

    def while_waiting(self, session: Session) -> None:
        """Ends an epoch if the reason is that its pass has ended."""
        if self.passes is None or not self.passes.pass_has_ended():
            return
        # In a run that was resumed at the end of a pass there was nothing left of it.
        self._num_empty_passes = self._num_empty_passes + 1 if self._totals is None else 0
        if self._num_empty_passes > 1:
            raise TaskError("a worker", ValueError("the dataset has not a single batch"))
        is_last = self._is_past_last(self._epoch + 1)
        if not is_last and self.passes.is_only_pass:
            warn(
                f"the data can be read once, and ended in epoch {self._epoch + 1} of {self.epochs} at step "
                f"{session.global_step}; training ends with it"
            )
            session.request_stop("the end of the data")
        elif is_last:
            session.request_stop(_EPOCHS)
        self._finish_epoch(session, validate=self._is_validation_epoch())
        if not session.should_stop():
            self.passes.begin_pass()
            self._epoch += 1

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        # Its own, or that of values that another hook has restored.
        self.validation_logs, self._validated_step = dict(logs), session.global_step

    def end(self, session: Session) -> None:
        if self._totals is not None:
            self._finish_epoch(session, validate=True)
        elif self._validated_step != session.global_step:
            self._run_validation(session)
        self.callbacks.end(session, self._finished[-1][1] if self._finished else {})

    def due_in(self, step: int) -> int | None:
        if self.callbacks.wants_batches:
            return 1
        due = []
        if self.steps_per_epoch:
            due.append(self.steps_per_epoch - (step - self.first_step) % self.steps_per_epoch)
        if self.validation_every_steps:
            due.append(self.validation_every_steps - step % self.validation_every_steps)
        return min(due, default=None)

    def idle_in(self, step: int) -> int | None:
        looks_at_values = self.validate is not None or self.callbacks.looks_at_model
        return self.due_in(step) if looks_at_values else None

    def _is_past_last(self, epoch: int) -> bool:
        return self.epochs is not None and epoch >= self.epochs

    def _epoch_at(self, step: int) -> int:
        if self.passes is not None:
            return self.first_epoch + self.passes.pass_number
        if not self.steps_per_epoch:
            return self.first_epoch
        return self.first_epoch + (step - self.first_step) // self.steps_per_epoch

    def _batch_at(self, step: int) -> int:
        since = step - self.first_step
        return since % self.steps_per_epoch if self.steps_per_epoch else since

    def _is_validation_epoch(self) -> bool:
        epoch = self._epoch + 1
        if isinstance(self.validation_freq, int):
            return epoch % self.validation_freq == 0
        return epoch in self.validation_freq

    def _finish_epoch(self, session: Session, *, validate: bool) -> None:
        if self._totals is None:
            return
        self.train_logs, self._totals = session.training_logs(self._totals), None
        logs = dict(self.train_logs)
        session.summaries.epoch("train", logs, session.global_step)
        if validate and self._run_validation(session):
            logs |= {f"val_{name}": value for name, value in self.validation_logs.items()}
        self._finished.append((self._epoch, logs))
        self.callbacks.end_epoch(session, self._epoch, logs)

    def _forget_later_epochs(self) -> None:
        """Removes the epochs that training will repeat after a failure of the cluster."""
        self._finished = [(epoch, logs) for epoch, logs in self._finished if epoch < self._epoch]
        self.history.epoch, self.history.history = [], {}
        for epoch, logs in self._finished:
            self.history.on_epoch_end(epoch, logs)

    def _run_validation(self, session: Session) -> bool:
        if self.validate is None or session.interrupted:
            return False
        if self._validated_step != session.global_step:
            logs = dict(self.validate(session))
            if session.interrupted:
                # It has not used all of the data.
                return False
            self.best.add(session.global_step, logs)
            session.publish_validation(logs)
            session.summaries.epoch("validation", logs, session.global_step)
        return True


def last_step_of(
    steps: int | None,
    epochs: int | None,
    steps_per_epoch: int | None,
    first_step: int,
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
    if steps_per_epoch is None:
        if epochs - first_epoch == 1 or by_passes:
            return None
        raise ConfigError(
            f"epochs={epochs}: the length of the data is not known; give steps (train.steps) or steps_per_epoch"
        )
    return first_step + (epochs - first_epoch) * steps_per_epoch
