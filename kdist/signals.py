"""Ctrl-C and SIGTERM during training: the first ends the session in good order, a second one at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from kdist.session import TrainSession
from kdist.warn import warn

#: Supervisors send a signal to a process and to its group; what comes so soon is the same one.
SAME_SIGNAL_SECS = 0.5

#: Ends this process with an exit code, whatever it is doing. Set by programs that are nothing but a run, as the command
#: line is; in the process of somebody else a signal that does not wait becomes an exception.
exit_at_once: Callable[[int], NoReturn] | None = None


class StopSignals:
    """While entered, SIGINT and SIGTERM interrupt `session`, which then saves and ends.

    Before the session has started there is nothing to save, and they are raised at once; so is a second signal, and
    what happens when the session has not ended after `grace_secs` seconds.

    Does nothing outside the main thread, where Python takes no signals. The handlers that were there before come back
    on exit.
    """

    def __init__(self, session: TrainSession, grace_secs: float) -> None:
        self._session = session
        self._grace_secs = grace_secs
        self._before: dict[int, object] = {}
        self._received_at = 0.0
        self._ended = threading.Event()
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def raise_received(self) -> None:
        """Raises what the signal means to Python's caller: KeyboardInterrupt, or SystemExit(143) for SIGTERM."""
        if self.received is not None:
            _raise(self.received)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at > SAME_SIGNAL_SECS:
                leave(signal.Signals(number))
            return
        self.received = signal.Signals(number)
        self._received_at = time.monotonic()
        if not self._session.is_started:
            self._session.request_stop(self.received.name)
            self.raise_received()
        self._session.interrupt(self.received.name)
        threading.Thread(target=self._watch, args=[self.received], daemon=True).start()

    def _watch(self, received: signal.Signals) -> None:
        if not self._ended.wait(self._grace_secs):
            warn(
                f"not ended {self._grace_secs:g} s after {received.name} (run.grace_secs); the run is left as "
                f"it stands; last checkpoint: {self._session.checkpoints.newest()}"
            )
            if exit_at_once is not None:
                exit_at_once(128 + received)
            signal.raise_signal(received)


def leave(received: signal.Signals) -> None:
    """Ends what a signal is to end, at once."""
    if exit_at_once is not None:
        exit_at_once(128 + received)
    _raise(received)


def _raise(received: signal.Signals) -> NoReturn:
    if received is signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + received)
