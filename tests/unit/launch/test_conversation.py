"""Two ends of a pipe that call each other."""

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from kdist.errors import ClusterError, ConfigError, TaskError
from kdist.launch.conversation import Conversation


class Session:
    """Stands for something that does not travel."""


class Stuck(Exception):
    """An exception that cannot travel."""

    def __init__(self) -> None:
        super().__init__("in a lock")
        self.lock = threading.Lock()


def conversing(answer_there: Callable[..., Any], answer_here: Callable[..., Any]) -> tuple[Conversation, Any]:
    """This end of a conversation whose other end answers in a thread, and that thread's connection."""
    here, there = Pipe()

    def serve() -> None:
        objects = {"session": "theirs"}
        other: list[Conversation] = []
        other.append(Conversation(there, lambda *a: answer_there(other[0], *a), {}, objects))
        while not there.closed:
            other[0].answer_for(0.02)

    threading.Thread(target=serve, daemon=True).start()
    return Conversation(here, answer_here, {Session: "session"}, {}), there


def test_a_call_returns_what_the_other_end_answers() -> None:
    conversation, there = conversing(lambda _, name, *numbers: (name, sum(numbers)), lambda: None)
    assert conversation.call("add", 1, 2) == ("add", 3)
    there.close()


def test_an_answer_may_call_back() -> None:
    def doubled(other: Conversation, name: str, number: int) -> Any:
        return 2 * other.call("number", number)

    conversation, there = conversing(doubled, lambda name, number: number + 1)
    assert conversation.call("double", 4) == 10
    there.close()


def test_objects_that_both_have_do_not_travel() -> None:
    conversation, there = conversing(lambda _, name, thing: thing, lambda: None)
    assert conversation.call("echo", Session()) == "theirs"
    there.close()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("no such value"), ConfigError, "no such value"),
        (TaskError("worker:0", "it died"), TaskError, "it died"),
        (SystemExit(3), SystemExit, "3"),
        (KeyError("tag"), KeyError, "tag"),
        (Stuck(), RuntimeError, "Stuck: in a lock"),
    ],
)
def test_an_error_of_the_answer_is_raised_by_the_call(error: BaseException, kind: type[Exception], text: str) -> None:
    def raises(_: Conversation, name: str) -> None:
        raise error

    conversation, there = conversing(raises, lambda: None)
    with pytest.raises(kind, match=text):
        conversation.call("anything")
    there.close()


def test_a_result_that_cannot_travel_is_an_error() -> None:
    conversation, there = conversing(lambda _, name: threading.Lock(), lambda: None)
    with pytest.raises(ConfigError, match="cannot be sent"):
        conversation.call("lock")
    there.close()


def test_a_call_of_a_process_that_has_ended_is_an_error() -> None:
    here, there = Pipe()
    there.close()
    with pytest.raises(ClusterError, match="has ended"):
        Conversation(here, lambda: None, {}, {}).call("anything")


def test_a_call_that_is_not_answered_ends_when_the_check_fails() -> None:
    here, _there = Pipe()

    def check() -> None:
        raise ClusterError("worker:0 is stopped")

    with pytest.raises(ClusterError, match="worker:0 is stopped"):
        Conversation(here, lambda: None, {}, {}, check).call("anything")


def test_another_thread_is_refused() -> None:
    here, _there = Pipe()
    conversation = Conversation(here, lambda: None, {}, {})
    raised: list[BaseException] = []

    def call() -> None:
        try:
            conversation.call("anything")
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "thread" in str(raised[0])
