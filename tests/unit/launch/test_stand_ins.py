"""What the process that trains knows of a hook that stays with the user."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kdist.hooks import CheckpointSaver, CheckpointSaverListener, FinalOps, Hook, StepCounter
from kdist.launch.stand_ins import UsersHook, hook_for


class Mine(Hook):
    needs_validation = True

    def after_run(self, context: Any, values: Any) -> None:
        pass


class MySaver(CheckpointSaver):
    pass


def stand_in_of(hook: Hook) -> tuple[Hook, list[Any]]:
    """The stand-in, and what it asks of the user's process, which answers 7."""
    asked: list[Any] = []

    def call(*what: Any) -> int:
        asked.append(what)
        return 7

    conversation: Any = SimpleNamespace(call=call)
    return hook_for(UsersHook.of(3, hook), conversation), asked


def test_methods_of_the_hook_are_called_where_it_is_and_others_do_nothing() -> None:
    stand_in, asked = stand_in_of(Mine())
    stand_in.after_run("context", "values")  # type: ignore[arg-type]
    assert asked == [("hook", 3, "after_run", "context", "values")]
    assert stand_in.due_in(5) is None
    stand_in.close()
    assert len(asked) == 1
    assert stand_in.needs_validation


def test_a_method_that_an_object_alone_has_is_called_too() -> None:
    hook = Mine()
    due_in: Callable[[int], int] = lambda step: step  # noqa: E731
    hook.due_in = due_in  # type: ignore[method-assign]
    stand_in, asked = stand_in_of(hook)
    assert stand_in.due_in(5) == 7
    assert asked == [("hook", 3, "due_in", 5)]


def test_a_stand_in_is_of_the_kind_of_its_hook() -> None:
    stand_in, _ = stand_in_of(MySaver(every_steps=5, full_every=4))
    assert isinstance(stand_in, CheckpointSaver)
    assert stand_in.full_every == 4


def test_hooks_with_code_of_the_user_stay() -> None:
    assert Mine().stays_with_user
    assert MySaver().stays_with_user
    assert FinalOps(lambda session: None).stays_with_user
    assert CheckpointSaver(listeners=[CheckpointSaverListener()]).stays_with_user
    assert not CheckpointSaver().stays_with_user
    assert not StepCounter().stays_with_user
