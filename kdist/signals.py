"""Ctrl-C and SIGTERM during training: the first ends the session in good order, a second Ctrl-C at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from kdist.session import TrainSession


class StopSignals:
    """While entered, SIGINT and SIGTERM interrupt `session`, which then saves and ends.

    Before the session has started there is nothing to save, and they are raised at once.

    Does nothing outside the main thread, where Python takes no signals. The handlers that were there before come back
    on exit. Meanwhile a second Ctrl-C is raised at once; a second SIGTERM, as supervisors send it to a process and to
    its group, says nothing new.
    """

    def __init__(self, session: TrainSession) -> None:
        self._session = session
        self._before: dict[int, object] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def raise_received(self) -> None:
        """Raises what the signal means to Python's caller: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        if not self._session.is_started:
            self._session.request_stop(self.received.name)
            self.raise_received()
        self._session.interrupt(self.received.name)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
