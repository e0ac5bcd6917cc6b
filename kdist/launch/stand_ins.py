"""Stand-ins, in the process that trains, for the hooks and callbacks that stay in the user's process.

`kdist.launch.users_hooks` is the other end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras

from kdist.hooks.base import Hook, Session
from kdist.hooks.keras_callbacks import Callbacks
from kdist.launch.conversation import Conversation
from kdist.model.state import write_to_model

#: Names of objects that both processes have.
SESSION, METRICS = "session", "metrics"
#: What the user's process calls itself, once, however often processes are started.
_ONCE = ("before_fit", "close", "after_fit")
#: The methods of hooks that are called from here.
_EVENTS = [name for name, method in vars(Hook).items() if inspect.isfunction(method) and name not in _ONCE]
#: What other parts of kdist want to know of a hook, if it has it.
_ATTRIBUTES = ("needs_validation", "follows_fit", "full_every")


@dataclass(frozen=True)
class UsersHook:
    """A hook that stays in the user's process.

    Attributes:
        index: which one.
        kind: the class of kdist that it is derived from.
        events: those of its methods that do anything.
        attributes: what is to be known of it here.
    """

    index: int
    kind: type[Hook]
    events: Sequence[str]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, index: int, hook: Hook) -> UsersHook:
        kind = next(c for c in type(hook).__mro__ if c.__module__.startswith("kdist."))
        is_own = {event: getattr(type(hook), event) is not getattr(Hook, event) for event in _EVENTS}
        events = [event for event in _EVENTS if is_own[event] or event in vars(hook)]
        return cls(index, kind, events, {name: getattr(hook, name) for name in _ATTRIBUTES if hasattr(hook, name)})


def hook_for(described: UsersHook, conversation: Conversation) -> Hook:
    """A hook of the same kind, whose methods call those of the original, as far as that has any of its own."""

    def calling(event: str) -> Callable[..., Any]:
        return lambda _stand_in, *arguments: conversation.call("hook", described.index, event, *arguments)

    methods = {event: getattr(Hook, event) for event in (*_EVENTS, *_ONCE)}
    methods |= {event: calling(event) for event in described.events}
    kind = type(f"Users{described.kind.__name__}", (described.kind,), {**methods, **described.attributes})
    # What a hook of that kind is made of is in the user's process.
    stand_in: Hook = object.__new__(kind)
    return stand_in


class CallbacksElsewhere(Callbacks):
    """The callbacks of the user's process, and those of this one, which are called after them.

    Args: as for `Callbacks`, and
        conversation: with the user's process.
        objects: has the session, once training has begun.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        *,
        conversation: Conversation,
        objects: Mapping[str, Any],
        epochs: int | None = None,
        steps: int | None = None,
    ) -> None:
        self._call = partial(conversation.call, "callbacks")
        of_user = conversation.call("prepare", epochs, steps)
        tests = (_TestBatches if of_user["acts_on_test_batches"] else _Tests)(conversation, objects)
        super().__init__([*callbacks, tests], model, epochs=epochs, steps=steps)
        vars(self).update(of_user)

    def begin(self, session: Session, epoch: int) -> None:
        self._call("begin", session, epoch)
        super().begin(session, epoch)

    def begin_again(self, session: Session, epoch: int) -> None:
        self._call("begin_again", session, epoch)
        super().begin_again(session, epoch)

    def begin_batch(self, session: Session, batch: int) -> None:
        self._call("begin_batch", session, batch)

    def end_batch(self, session: Session, batch: int, logs: Mapping[str, Any]) -> None:
        self._call("end_batch", session, batch, logs)

    def end_epoch(self, session: Session, epoch: int, logs: dict[str, float]) -> None:
        logs.update(self._call("end_epoch", session, epoch, logs))
        super().end_epoch(session, epoch, logs)

    def end(self, session: Session, logs: Mapping[str, Any]) -> None:
        self._call("end", session, logs)
        super().end(session, logs)

    def pull(self, session: Session) -> None:
        """The user's process gets the values when its callbacks are called."""

    def push(self, session: Session) -> bool:
        """It has sent back what they have changed."""
        return False


class _Tests(keras.callbacks.Callback):
    """Passes the events of a validation on."""

    def __init__(self, conversation: Conversation, objects: Mapping[str, Any]) -> None:
        super().__init__()
        self._conversation = conversation
        self._objects = objects

    def on_test_begin(self, logs: Any = None) -> None:
        self._pass("on_test_begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._pass("on_test_end", logs)

    def _pass(self, event: str, *arguments: Any) -> None:
        session: Session = self._objects[SESSION]
        if self._conversation.call("test", event, session, *arguments):
            # What is validated is the model of this process.
            session.read_into(partial(write_to_model, self.model))


class _TestBatches(_Tests):
    """Those of its batches, too."""

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._pass("on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._pass("on_test_batch_end", batch, logs)


def answer(objects: Mapping[str, Any], name: str, path: Sequence[str], *call: Any) -> Any:
    """What a hook of the user's process asks of the session of this one.

    Args:
        objects: has the session, once a hook was called with it.
        name: `get` returns whether `path` leads from the session to a method, and the value if not; `call` calls the
            method.
        call: its arguments, and its named arguments.
    """
    target = objects[SESSION]
    for part in path:
        target = getattr(target, part)
    if name == "get":
        return (True, None) if callable(target) else (False, target)
    arguments, named = call
    return target(*arguments, **named)
