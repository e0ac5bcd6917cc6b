"""Keras callbacks in distributed training: they see the chief's model, and their changes reach the tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
from keras.callbacks import Callback

from kdist._compat.keras import acts_on
from kdist.errors import ConfigError
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.hooks.ends import NanTensor
from kdist.model.names import GLOBAL_STEP, STATE_RESETS, average_of
from kdist.model.state import (
    finalize_ema,
    layer_states,
    names_here,
    read_from_model,
    rows_cannot_be_sent,
    stateful_layers,
    write_to_model,
)

CallbackOrSeveral: TypeAlias = Callback | Sequence[Callback] | keras.callbacks.CallbackList


#: Keras callbacks that only use logs, so that the values need not be sent to the chief.
_LOGS_ONLY = (
    keras.callbacks.History,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
)
#: Those that set the learning rate, and look at nothing else.
RATE_ONLY = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
_BATCH_EVENTS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
#: Of an evaluation and of a prediction.
TEST_BATCH_EVENTS = ("on_test_batch_begin", "on_test_batch_end")
PREDICT_BATCH_EVENTS = ("on_predict_batch_begin", "on_predict_batch_end")


class Callbacks:
    """The callbacks of one `fit`, called at its events.

    Before an event, the chief's model gets the tasks' values, as far as the callbacks may look at them: callbacks that
    only set the learning rate get no more than that, and the large variables of a model that stays on its servers
    remain there. Their changes to it (learning rate, weights, slots) are sent back, and `model.stop_training`
    ends the session.

    Args:
        epochs, steps: those of `fit`, for `callback.params`.

    Attributes:
        looks_at_model: whether a callback may read the model, or change it.
        wants_batches: whether a callback acts on every batch; then training returns to the chief after every batch.
        steps_per_batch: the steps that callbacks know as a batch: the model's `steps_per_execution`.
        acts_on_test_batches: whether a callback acts on every batch of a validation; then the chief validates.
        logs_learning_rate: whether a callback adds the learning rate to the logs of epochs.
        have_changed_weights: whether one has changed parameters or state since this was last set to False.
    """

    def __init__(
        self, callbacks: Sequence[Callback], model: keras.Model, *, epochs: int | None = None, steps: int | None = None
    ) -> None:
        self._model = model
        lookers = [callback for callback in callbacks if not _needs_logs_only(callback)]
        self.looks_at_model = bool(lookers)
        self._keeps_weights = any(type(callback) is keras.callbacks.EarlyStopping for callback in lookers)
        self.logs_learning_rate = any(isinstance(callback, RATE_ONLY) for callback in lookers)
        self._sets_rate_only = all(type(callback) in RATE_ONLY for callback in lookers)
        self.steps_per_batch = model.steps_per_execution
        self.wants_batches = any(acts_on_any(callback, _BATCH_EVENTS) for callback in callbacks)
        self.acts_on_test_batches = any(acts_on_any(callback, TEST_BATCH_EVENTS) for callback in callbacks)
        self.list = keras.callbacks.CallbackList(list(callbacks), model=model, verbose=0, epochs=epochs, steps=steps)
        self.have_changed_weights = False
        self._seen: dict[str, np.ndarray] = {}
        self._stateful = stateful_layers(model)
        #: Those that callbacks have reset.
        self._reset: set[int] = set()
        self._has_begun = False
        #: Whether the model has averages in the place of its parameters.
        self._has_averages = False

    def begin(self, session: Session, epoch: int) -> None:
        """Begins training at `epoch`, or continues it there after a failure of the cluster.

        Raises:
            ConfigError: a callback keeps weights, and the model stays on its servers, or has more than weights.
        """
        has_rows = rows_cannot_be_sent(self._model)
        if self._keeps_weights and (has_rows or session.spec.stays_on_servers()):
            why = "has a DynamicEmbedding, whose rows are no weights" if has_rows else "is larger than export_max_bytes"
            raise ConfigError(
                f"callbacks: EarlyStopping(restore_best_weights=True) keeps weights in this process, and model "
                f"{self._model.name} {why}; kdist.hooks.EarlyStopping(restore_best=True) keeps them in a checkpoint"
            )
        self.pull(session)
        if not self._has_begun:
            # Again if the cluster failed before the end was saved: callbacks have closed their files.
            self._has_begun, self._has_averages, self._model.stop_training = True, False, False
            for layer in self._stateful:
                # Their states are on the workers, and the model's own do not show it.
                object.__setattr__(layer, "reset_state", partial(self._reset_state, layer))
            self.list.on_train_begin()
        self._begin_epoch(session, epoch)

    @property
    def of_validation(self) -> keras.callbacks.CallbackList:
        """Those that see a validation: none after the end of training, where they have closed their files."""
        return self.list if self._has_begun else keras.callbacks.CallbackList()

    def begin_batch(self, session: Session, batch: int) -> None:
        self.list.on_train_batch_begin(batch)
        self.push(session)

    def end_batch(self, session: Session, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after the last step of a batch; `logs` cover its epoch so far."""
        self.pull(session)
        self.list.on_train_batch_end(batch, dict(logs))
        self.push(session)

    def end_epoch(self, session: Session, epoch: int, logs: dict[str, float]) -> None:
        """Ends an epoch, and begins the next one unless training stops. Callbacks may add to `logs`."""
        self.pull(session)
        self.list.on_epoch_end(epoch, logs)
        self._stop_if_asked(session)
        self._begin_epoch(session, epoch + 1)

    def end(self, session: Session, logs: Mapping[str, Any]) -> None:
        """Ends training: as in Keras, the model has the moving averages of its parameters, if it keeps any."""
        self.pull(session)
        self._has_averages = not session.interrupted and not session.spec.stays_on_servers()
        if self._has_averages:
            finalize_ema(self._model)
            self.see(session)
        self.list.on_train_end(dict(logs))
        self._has_begun = False
        self.push(session)
        for layer in self._stateful:
            vars(layer).pop("reset_state", None)

    def _begin_epoch(self, session: Session, epoch: int) -> None:
        if not session.should_stop():
            self.list.on_epoch_begin(epoch)
        self.push(session)

    def pull(self, session: Session) -> None:
        """Gives the model the values that the callbacks may look at."""
        if self.looks_at_model:
            write_to_model(self._model, session.read(self._names(session)))
            self.see(session)

    def see(self, session: Session) -> None:
        """Remembers the values of the model: what differs from them later, a callback has changed."""
        if self.looks_at_model:
            self._seen = read_from_model(self._model, self._names(session))

    def _names(self, session: Session) -> list[str] | None:
        """The values that the callbacks may look at; None for all."""
        if self._sets_rate_only:
            return [name for name, shape in session.strategy.values.shapes.items() if shape == ()]
        return names_here(self._model) if session.spec.stays_on_servers() else None

    def push(self, session: Session) -> None:
        """Sends what callbacks have changed in the model to the tasks."""
        self._stop_if_asked(session)
        if self._reset:
            times = [id(layer) in self._reset for layer in self._stateful for _ in layer_states(layer)]
            session.write({STATE_RESETS: session.read([STATE_RESETS])[STATE_RESETS] + times})
            self._reset.clear()
        if self.looks_at_model:
            now = read_from_model(self._model, self._seen)
            # The global step is that of the tasks, and they have random seeds of their own.
            kept = session.strategy.values.shapes.keys() - {GLOBAL_STEP}
            changed = {n: v for n, v in now.items() if n in kept and not np.array_equal(v, self._seen[n])}
            if self._has_averages:
                # Otherwise the average would take the place of what a callback has assigned.
                changed |= {average_of(n): v for n, v in changed.items() if average_of(n) in kept}
            if changed:
                self.have_changed_weights |= any(name.startswith(("parameters/", "state/")) for name in changed)
                session.write(changed)
                self._seen = now

    def _reset_state(self, layer: keras.layers.RNN) -> None:
        type(layer).reset_state(layer)
        self._reset.add(id(layer))

    def _stop_if_asked(self, session: Session) -> None:
        if self._model.stop_training:
            session.request_stop("stop_training")


def list_of(callbacks: CallbackOrSeveral | None) -> list[Callback]:
    """Returns a list of the callbacks if kdist can call them.

    Args:
        callbacks: as Keras takes them: one, several in a list or in a `CallbackList`, or None.

    Raises:
        ConfigError: one is not a callback, or cannot be used here.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
    for callback in listed:
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks: {type(callback).__name__} is no keras.callbacks.Callback")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ConfigError(
                f"callbacks: {type(callback).__name__} cannot be used: kdist saves and resumes runs itself: "
                "hooks.checkpoint says when, the same run_dir resumes"
            )
    return listed


def as_hooks(callbacks: Sequence[Callback], hooks: Sequence[Hook]) -> tuple[list[Callback], list[Hook]]:
    """Turns callbacks that have an equivalent hook into hooks; returns the other callbacks, and all hooks."""
    stop = [callback for callback in callbacks if type(callback) is keras.callbacks.TerminateOnNaN]
    others = [callback for callback in callbacks if callback not in stop]
    if not stop:
        return others, list(hooks)
    return others, [_TerminateOnNaN(stop), *(hook for hook in hooks if not isinstance(hook, NanTensor))]


class _TerminateOnNaN(NanTensor):
    """Calls Keras's callbacks of that name when the loss of a run is not finite.

    As callbacks, they would make training return to the chief after every batch.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.TerminateOnNaN]) -> None:
        super().__init__()
        self._callbacks = callbacks

    def after_run(self, context: RunContext, values: RunValues) -> None:
        loss, spec = values.totals.loss, context.session.spec
        if math.isfinite(loss):
            return
        last, lengths = values.global_step - 1, spec.epoch_lengths
        batch = last - spec.count.begin if lengths is None else lengths.batch_at(last)
        for callback in self._callbacks:
            callback.set_model(spec.model)
            callback.on_batch_end(batch, {"loss": loss})
        context.session.stop_diverged("NanTensor")


def _needs_logs_only(callback: Callback) -> bool:
    if type(callback) is keras.callbacks.EarlyStopping:
        return not callback.restore_best_weights
    return type(callback) in _LOGS_ONLY


def acts_on_any(callback: Callback, events: Sequence[str]) -> bool:
    return any(acts_on(callback, event) for event in events)
