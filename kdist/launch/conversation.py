"""`Conversation`: two processes of this machine call each other over a pipe; while one waits, it answers the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from kdist.data.pickling import pickled, unpickled
from kdist.errors import ClusterError

_POLL_SECS = 0.1
_CALL, _RESULT, _RAISED = range(3)


class Conversation:
    """One end of the pipe.

    Calls are nested: an answer may itself call the other process, which waits for the answer and can answer, too.

    Args:
        connection: to the other process.
        answer: `(name, *arguments)` -> the result of a call by the other process; an exception goes there.
        shared: classes of objects that do not travel: the other process has an object of its own under that name.
        objects: those of this process, by these names; one that is sent is added.
        check: called again and again while this process waits; raises if the other process does not respond any more.
    """

    def __init__(
        self,
        connection: Connection,
        answer: Callable[..., Any],
        shared: Mapping[type, str],
        objects: dict[str, Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._answer_call = answer
        self._shared = shared
        self._objects = objects
        self._check = check
        self._thread = threading.get_ident()

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the other process.

        Raises:
            ClusterError: the other process has ended.
            Exception: what the call raised; a RuntimeError describes an exception that cannot travel.
            ConfigError: an argument, or the result, cannot travel.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("a session can be used by the thread that called the hook or callback, by no other")
        message = self._pickled(_CALL, (name, arguments))
        try:
            self._connection.send_bytes(message)
            while True:
                kind, content = self._receive()
                if kind != _CALL:
                    break
                self._answer(*content)
        except (EOFError, OSError):
            self._check()
            raise ClusterError("the process at the other end of the pipe has ended") from None
        if kind == _RAISED:
            raise content
        return content

    def answer_for(self, seconds: float) -> None:
        """Answers the calls that arrive within so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._connection.poll(left):
                    _, content = self._unpickled(self._connection.recv_bytes())
                    self._answer(*content)
            except (EOFError, OSError):
                # The other process has ended; who started it sees why.
                time.sleep(max(0.0, deadline - time.monotonic()))

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = self._answer_call(name, *arguments)
            message = self._pickled(_RESULT, result)
        except BaseException as error:  # noqa: BLE001 - raised in the process that called
            message = self._pickled(_RAISED, _sendable(error))
        self._connection.send_bytes(message)

    def _receive(self) -> tuple[int, Any]:
        while not self._connection.poll(_POLL_SECS):
            self._check()
        received: tuple[int, Any] = self._unpickled(self._connection.recv_bytes())
        return received

    def _pickled(self, kind: int, content: Any) -> bytes:
        return pickled((kind, content), self._name_of)

    def _unpickled(self, message: bytes) -> Any:
        return unpickled(message, self._objects)

    def _name_of(self, thing: Any) -> str | None:
        name = self._shared.get(type(thing))
        if name is not None:
            self._objects[name] = thing
        return name


def _sendable(error: BaseException) -> BaseException:
    """The error, if another process can raise it as it is, else one that describes it."""
    try:
        unpickled(pickled(error))
    except Exception:  # noqa: BLE001 - its class may do anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
