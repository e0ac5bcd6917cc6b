"""Keras callbacks around distributed training: they see the chief's model, and what they change reaches the tasks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
import keras
import numpy as np
from keras.callbacks import Callback

from kdist.errors import ConfigError
from kdist.hooks.base import Hook
from kdist.hooks.nan_tensor import NanTensor
from kdist.parameters.local import read_from_model, write_to_model
from kdist.parameters.store import GLOBAL_STEP

if TYPE_CHECKING:
    from kdist.session import TrainSession

#: Why a callback cannot be used.
_REFUSED: dict[type[Callback], str] = {
    keras.callbacks.BackupAndRestore: (
        "kdist saves and resumes runs itself: hooks.checkpoint says when, the same run_dir goes on"
    ),
}
#: Callbacks of Keras that look at logs only, so that the values may stay where they are.
_LOGS_ONLY = (
    keras.callbacks.History,
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
)
_BATCH_EVENTS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_BATCH_EVENTS = ("on_test_batch_begin", "on_test_batch_end")
#: What callbacks of Keras that could act on every batch are told if they need not.
_FREQUENCIES = ("save_freq", "update_freq")


class Callbacks:
    """The callbacks of one `fit`, called at its events.

    Before an event the chief's model gets the present values from the tasks; what callbacks change in it (the learning
    rate, weights, slots) goes back to them, and `model.stop_training` ends the session.

    Args:
        callbacks: called in this order.
        model: the chief's own.
        epochs, steps: what `fit` was told, for `callback.params`.

    Attributes:
        looks_at_model: whether some callback may look at the model, or change it.
        wants_batches: whether some callback acts on every batch; training then returns to the chief after every step.
        acts_on_test_batches: whether some callback acts on every batch of a validation, which the chief then does.
    """

    def __init__(
        self, callbacks: Sequence[Callback], model: keras.Model, *, epochs: int | None = None, steps: int | None = None
    ) -> None:
        self._model = model
        self.looks_at_model = any(type(callback) not in _LOGS_ONLY for callback in callbacks)
        self.wants_batches = any(_acts_on_batches(callback) for callback in callbacks)
        self.acts_on_test_batches = any(_overrides(callback, _TEST_BATCH_EVENTS) for callback in callbacks)
        self.list = keras.callbacks.CallbackList(list(callbacks), model=model, verbose=0, epochs=epochs, steps=steps)
        self._seen: dict[str, np.ndarray] = {}
        self._has_ended = False

    def begin(self, session: TrainSession, epoch: int) -> None:
        """Training begins, at `epoch`."""
        self._model.stop_training = False
        self._pull(session)
        self.list.on_train_begin()
        self._begin_epoch(session, epoch)

    def begin_again(self, session: TrainSession, epoch: int) -> None:
        """Training goes on at `epoch`, after the cluster failed."""
        self._pull(session)
        if self._has_ended:
            # It failed before the end was saved; for callbacks that have closed their files training begins anew.
            self.list.on_train_begin()
            self._has_ended = False
        self._begin_epoch(session, epoch)

    def begin_batch(self, session: TrainSession, batch: int) -> None:
        """A step is about to run."""
        self.list.on_train_batch_begin(batch)
        self._push(session)

    def end_batch(self, session: TrainSession, batch: int, logs: Mapping[str, float]) -> None:
        """A step has ended; `logs` are over its epoch so far."""
        self._pull(session)
        self.list.on_train_batch_end(batch, dict(logs))
        self._push(session)

    def end_epoch(self, session: TrainSession, epoch: int, logs: dict[str, float]) -> None:
        """An epoch has ended, and another one begins unless training is to stop. Callbacks may add to `logs`."""
        self._pull(session)
        self.list.on_epoch_end(epoch, logs)
        self._stop_if_asked(session)
        if session.should_stop():
            self._push(session)
        else:
            self._begin_epoch(session, epoch + 1)

    def end(self, session: TrainSession, logs: Mapping[str, float]) -> None:
        """Training has ended."""
        self._pull(session)
        self.list.on_train_end(dict(logs))
        self._has_ended = True
        self._push(session)

    def _begin_epoch(self, session: TrainSession, epoch: int) -> None:
        if not session.should_stop():
            self.list.on_epoch_begin(epoch)
        self._push(session)

    def _pull(self, session: TrainSession) -> None:
        if self.looks_at_model:
            write_to_model(self._model, session.strategy.read())
            self._seen = read_from_model(self._model)

    def _push(self, session: TrainSession) -> None:
        self._stop_if_asked(session)
        if self.looks_at_model:
            now = read_from_model(self._model)
            # The global step is that of the tasks, and random seeds they have of their own.
            kept = session.strategy.shapes.keys() - {GLOBAL_STEP}
            changed = {n: v for n, v in now.items() if n in kept and not np.array_equal(v, self._seen[n])}
            if changed:
                session.write(changed)
                self._seen = now

    def _stop_if_asked(self, session: TrainSession) -> None:
        if self._model.stop_training:
            session.request_stop("stop_training")


def checked(callbacks: Sequence[Any]) -> list[Callback]:
    """The callbacks, if kdist can call them.

    Raises:
        ConfigError: one is no callback, or cannot be used here; says why.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks: {type(callback).__name__} is no keras.callbacks.Callback")
        for kind, why in _REFUSED.items():
            if isinstance(callback, kind):
                raise ConfigError(f"callbacks: {type(callback).__name__} cannot be used: {why}")
    return list(callbacks)


def as_hooks(callbacks: Sequence[Callback], hooks: Sequence[Hook]) -> tuple[list[Callback], list[Hook]]:
    """The callbacks that are left when those that are hooks in disguise have become hooks, and the hooks."""
    if not any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks):
        return list(callbacks), list(hooks)
    # It looks at every run, and does not have the chief look at every batch.
    others = [callback for callback in callbacks if not isinstance(callback, keras.callbacks.TerminateOnNaN)]
    stop = NanTensor(fail_on_nan_loss=False)
    return others, [stop, *(hook for hook in hooks if not isinstance(hook, NanTensor))]


def without_model(callbacks: Sequence[Callback]) -> list[Callback]:
    """Copies for another process, which has a model of its own."""
    copies = [copy.copy(callback) for callback in callbacks]
    for callback in copies:
        callback._model = None
    return copies


def states_of(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    """What the callbacks of a process have come to know, as far as it can travel."""
    return [{n: v for n, v in vars(c).items() if n != "_model" and _can_travel(v)} for c in callbacks]


def set_states(callbacks: Sequence[Callback], states: Sequence[Mapping[str, Any]], model: keras.Model) -> None:
    """Gives callbacks what their copies came to know in another process."""
    for callback, state in zip(callbacks, states):
        vars(callback).update(state)
        callback.set_model(model)


def _can_travel(value: Any) -> bool:
    if isinstance(value, (keras.Model, keras.optimizers.Optimizer)) or callable(value):
        return False
    with suppress(Exception):
        cloudpickle.dumps(value)
        return True
    return False


def _acts_on_batches(callback: Callback) -> bool:
    if any(getattr(callback, name, None) == "epoch" for name in _FREQUENCIES):
        return False
    return _overrides(callback, _BATCH_EVENTS)


def _overrides(callback: Callback, events: Sequence[str]) -> bool:
    return not all(keras.src.utils.is_default(getattr(callback, event)) for event in events)
