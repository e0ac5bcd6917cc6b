"""Hooks and callbacks that stay in the user's process while a process of its own trains.

They may hold what cannot travel, such as the run of a tracker, and what they record belongs to the user. The process
that trains has a stand-in for each (`kdist.launch.stand_ins`), which calls the original over a pipe. What the original
asks of its session becomes a call in the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from kdist.errors import ConfigError
from kdist.forks import children_end_here
from kdist.hooks.base import Hook, Session
from kdist.hooks.keras_callbacks import Callbacks, EpochLogs
from kdist.launch.stand_ins import METRICS, SESSION, UsersHook
from kdist.model.metrics import MetricReader
from kdist.run.result import Result
from kdist.strategies.base import TrainingSpec

_ABOUT_CALLBACKS = ("looks_at_model", "wants_batches", "acts_on_test_batches", "logs_learning_rate")


class UsersHooks:
    """The hooks and callbacks of one fit that stay here, called as the process that trains says.

    Args:
        hooks: all hooks of the fit.
        callbacks: all of them stay.
        spec: what is trained; its model is the one that callbacks see.
        metrics: reads the metrics of that model.
        copied: the `tf.Variable`s of which the processes that train have copies.

    Attributes:
        error: what the hook or callback that was called last has raised; None if it has raised nothing.
    """

    def __init__(
        self,
        hooks: Sequence[Hook],
        callbacks: Sequence[keras.callbacks.Callback],
        spec: TrainingSpec,
        metrics: MetricReader,
        copied: Sequence[tf.Variable] = (),
    ) -> None:
        self._copied = [(variable, variable.numpy()) for variable in copied]
        self.error: BaseException | None = None
        self._hooks = hooks
        self._staying = [hook for hook in hooks if hook.stays_with_user]
        self._epoch_logs = EpochLogs()
        self._given_callbacks = [*callbacks, self._epoch_logs]
        self._spec = spec
        self._metrics = metrics
        self._callbacks: Callbacks | None = None
        #: After a restart of the processes, training resumes for hooks and callbacks that have begun.
        self._begun: set[int] = set()
        self._callbacks_have_begun = False

    def stand_ins(self) -> list[Hook | UsersHook]:
        """The hooks that are to travel, and descriptions of those that stay."""
        return [UsersHook.of(i, hook) if hook.stays_with_user else hook for i, hook in enumerate(self._hooks)]

    def objects(self, call: Callable[..., Any]) -> dict[str, Any]:
        """What stands here for objects of the process that trains.

        Args:
            call: calls that process.
        """
        return {METRICS: self._metrics, SESSION: SessionElsewhere(call, self._hooks, self._spec)}

    def answer(self, name: str, *arguments: Any) -> Any:
        """Calls a hook, or the callbacks, for the process that trains."""
        self.error = None
        try:
            with children_end_here():
                return getattr(self, f"call_{name}")(*arguments)
        except BaseException as error:
            self.error = error
            raise

    def call_hook(self, index: int, event: str, *arguments: Any) -> Any:
        """Calls a method of a hook."""
        if event == "begin":
            if index in self._begun:
                return None
            self._begun.add(index)
        return getattr(self._hooks[index], event)(*arguments)

    def call_callbacks(self, event: str, *arguments: Any) -> Any:
        """Calls a method of all callbacks; returns the logs of an epoch that ended, to which they may have added."""
        assert self._callbacks is not None
        if event == "begin":
            event = "begin_again" if self._callbacks_have_begun else "begin"
            self._callbacks_have_begun = True
        result = getattr(self._callbacks, event)(*arguments)
        for variable, value in self._copied:
            if not np.array_equal(variable.numpy(), value):
                raise ConfigError(
                    f"callbacks: {variable.name} is a tf.Variable that the step reads, and {event} has assigned it; "
                    "with this strategy the processes that train have copies of their own: make it a keras.Variable, "
                    "whose values travel"
                )
        return self._epoch_logs.logs if event == "end_epoch" else result

    def call_prepare(self, epochs: int | None, steps: int | None) -> dict[str, bool]:
        """Makes the callbacks ready; returns what `Callbacks` says of them, by its attributes.

        Args:
            epochs, steps: those of the fit, for `callback.params`.
        """
        if self._callbacks is None:
            self._callbacks = Callbacks(self._given_callbacks, self._spec.model, epochs=epochs, steps=steps)
        return {name: getattr(self._callbacks, name) for name in _ABOUT_CALLBACKS}

    def call_test(self, event: str, session: Session, *arguments: Any) -> bool:
        """Passes an event of a validation on to the callbacks; returns whether they have changed values."""
        assert self._callbacks is not None
        if event == "on_test_begin":
            self._callbacks.pull(session)
        getattr(self._callbacks.list, event)(*arguments)
        return self._callbacks.push(session)

    def before_fit(self, run_dir: Path, result: Result) -> None:
        """Calls `before_fit` of the hooks."""
        for hook in self._staying:
            hook.before_fit(run_dir, result)

    def close(self) -> None:
        """Closes the hooks, the last one first."""
        with ExitStack() as closing:
            for hook in self._staying:
                closing.callback(hook.close)

    def after_fit(self, result: Result) -> None:
        """Calls `after_fit` of the hooks."""
        for hook in self._staying:
            hook.after_fit(result)


class SessionElsewhere:
    """What a hook sees of the session in another process: what is not here is asked for, and calls are made there.

    Args:
        call: calls the other process.
        hooks: of the fit, as the user gave them.
        spec: what is trained.
    """

    def __init__(self, call: Callable[..., Any], hooks: Sequence[Hook], spec: TrainingSpec) -> None:
        self.hooks = hooks
        self.spec = spec
        self.strategy, self.checkpoints, self.summaries = (
            _Elsewhere(call, (name,)) for name in ("strategy", "checkpoints", "summaries")
        )
        self._session = _Elsewhere(call, ())

    def read_into(self, take: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """All values; this process gets them at once."""
        take(cast(Session, self).read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class _Elsewhere:
    """An object of the other process; `path` leads to it from the session."""

    def __init__(self, call: Callable[..., Any], path: tuple[str, ...]) -> None:
        self._call = call
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        path = (*self._path, name)
        try:
            is_method, value = self._call("get", path)
        except ConfigError as error:
            raise ConfigError(f"session.{'.'.join(path)} cannot be read from another process: {error}") from None
        return partial(self._call_method, path) if is_method else value

    def _call_method(self, path: tuple[str, ...], *arguments: Any, **named: Any) -> Any:
        return self._call("call", path, arguments, named)
