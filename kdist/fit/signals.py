"""Signals that end a run: Ctrl-C, and those of `run.stop_signals`, which schedulers send to all tasks at once.

After the first one, the chief saves and exits, and the other tasks serve until it has. A second one ends the process at
once. The exit code is 130 after Ctrl-C and 143 after any other signal.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from kdist import forks, log
from kdist.cluster.processes.child import does_nothing
from kdist.config.checks import STOP_SIGNALS
from kdist.log import warn

if TYPE_CHECKING:
    from typing_extensions import Self

    from kdist.cluster.spec import Task
    from kdist.session import TrainSession

#: Schedulers send a signal to a process and to its group, or twice; one that follows so soon is the same.
SAME_SIGNAL_SECS = 0.5
INTERRUPTED, STOPPED = 130, 143

#: Ends this process with an exit code, whatever it is doing. Set by programs that are nothing but a run, as the command
#: line is; in the process of somebody else a signal that does not wait becomes an exception.
exit_at_once: Callable[[int], NoReturn] | None = None


def exit_code_of(number: int) -> int:
    """The exit code of a run after signal `number`."""
    return INTERRUPTED if number == signal.SIGINT else STOPPED


class _Arrivals:
    """The signals that have arrived so far.

    Attributes:
        first: the first of them; None if there is none.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._last: signal.Signals | None = None
        self._last_at = 0.0

    def add(self, number: int, stop: Callable[[signal.Signals], None]) -> None:
        """Passes the first signal to `stop`; a second one, which is not the same request, ends the process at once."""
        # SIGUSR1 ahead of a time limit and SIGTERM at the limit are one request to stop.
        was_ahead = self._last not in (None, signal.SIGTERM, signal.SIGINT) and number == signal.SIGTERM
        if self.first is not None and not was_ahead:
            if time.monotonic() - self._last_at > SAME_SIGNAL_SECS:
                leave(signal.Signals(number))
            return
        self._last, self._last_at = signal.Signals(number), time.monotonic()
        if self.first is None:
            self.first = self._last
            stop(self.first)


class _Signals:
    """While entered, passes the first signal to `_stop`; a second one ends the process at once.

    Does nothing outside the main thread, where Python receives no signals. Signals that the process ignores stay
    ignored, as in a task that the chief has started, and a program that handles SIGUSR1 or the like itself keeps its
    handler. The previous handlers are restored on exit, and in children that the user's code forks.

    Args:
        grace_secs: seconds that the first signal leaves to the process.
        names: of signals, in addition to SIGINT.
    """

    def __init__(self, grace_secs: float, names: Iterable[str]) -> None:
        self._grace_secs = grace_secs
        self._numbers = [signal.SIGINT, *(signal.Signals[name] for name in names)]
        self._before: dict[int, Any] = {}
        self._arrivals = _Arrivals()
        self._ended = threading.Event()
        self._cancel: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                before = signal.getsignal(number)
                is_ours = number in (signal.SIGINT, signal.SIGTERM) or before in (signal.SIG_DFL, _raise_early)
                is_ignored = before in (signal.SIG_IGN, does_nothing)
                is_free = not is_ignored and not (before == signal.SIG_DFL and _is_caught(number))
                if is_ours and is_free:
                    self._before[number] = before
                    signal.signal(number, self._handle)
            self._cancel = forks.undo_in_children(self._restore)
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._restore()
        self._cancel()
        if len(raised) > 1 and isinstance(raised[1], Exception):
            self._raise_again()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def received(self) -> signal.Signals | None:
        """The first signal; None if there is none."""
        return self._arrivals.first

    def _handle(self, number: int, _frame: FrameType | None = None) -> None:
        self._arrivals.add(number, self._stop)

    def _stop(self, received: signal.Signals) -> None:
        """Handles the first signal."""

    def _raise_again(self) -> None:
        """Raises the exception of a signal whose place another one may have taken; see `requested_exit`."""

    def _leave_in_time(
        self, received: signal.Signals, message: Callable[[], str], at_once: Callable[[], None] = lambda: None
    ) -> None:
        """Ends the process with a message if it has not left this context after `grace_secs` seconds.

        `at_once` is called in another thread: the signal may have come in the middle of a print.
        """

        def watch() -> None:
            at_once()
            if not self._ended.wait(self._grace_secs):
                warn(message())
                if exit_at_once is not None:
                    exit_at_once(exit_code_of(received))
                # Whatever the main thread waits for.
                signal.pthread_kill(threading.main_thread().ident or 0, received)

        threading.Thread(target=watch, daemon=True).start()


def _is_caught(number: int) -> bool:
    """True if this process catches a signal in C, as faulthandler does, unknown to Python; see proc(5)."""
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            caught = next(line for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


_early = _Arrivals()
#: Set if a run has said that a signal has stopped it.
said = threading.Event()


def stop_before_training() -> None:
    """Lets stop signals end this process, which only runs kdist, by SystemExit as long as there is nothing to save."""
    before = {name: signal.signal(signal.Signals[name], _raise_early) for name in STOP_SIGNALS}

    def restore() -> None:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)

    forks.undo_in_children(restore)


def _raise_early(number: int, _frame: FrameType | None) -> None:
    _early.add(number, _raise)


def requested_exit() -> SystemExit | None:
    """The exit that a stop signal has requested before there was anything to save; None without such a signal.

    A signal may arrive anywhere. Inside a library, its exception may be discarded, or replaced by another one, for
    example by a `finally` that uses a variable which was not assigned yet.
    """
    return None if _early.first is None else SystemExit(exit_code_of(_early.first))


class StopSignals(_Signals):
    """While entered, Ctrl-C and stop signals interrupt `session`, which then saves and ends.

    Before the session has started there is nothing to save, and they raise an exception at once. So does a second
    signal, and a session that has not ended after `grace_secs` seconds.
    """

    def __init__(self, session: TrainSession, grace_secs: float, names: Collection[str] = STOP_SIGNALS) -> None:
        super().__init__(grace_secs, names)
        self._session = session

    def __enter__(self) -> Self:
        super().__enter__()
        if (asked := requested_exit()) is not None:
            super().__exit__()
            raise asked
        return self

    def _raise_again(self) -> None:
        if not self._session.is_started and self.received is not None:
            _raise(self.received)

    def raise_received(self) -> None:
        """Raises the exception of the signal, after the run has said it: KeyboardInterrupt, or SystemExit(143)."""
        if self.received is not None:
            said.set()
            _raise(self.received)

    def _stop(self, received: signal.Signals) -> None:
        if not self._session.is_started:
            self._session.request_stop(received.name)
            _raise(received)
        self._session.interrupt(received.name)
        at_most = f"saving, at most {self._grace_secs:g} s (run.grace_secs)"
        stop_line = log.Line(f"stop  | {received.name}: {at_most}; again: ends at once", "stop")
        self._leave_in_time(
            received,
            lambda: (
                f"not ended {self._grace_secs:g} s after {received.name} (run.grace_secs); the run is left as "
                f"it stands; last checkpoint: {self._session.checkpoints.newest()}"
            ),
            at_once=lambda: self._session.print_line(stop_line),
        )


class TaskSignals(_Signals):
    """While entered, signals do not end a task that the chief needs in order to save.

    Before it serves, the first signal ends it by SystemExit(0): it was told to stop and has nothing to lose. From then
    on it continues until the chief releases it, at most `grace_secs` seconds.

    Attributes:
        is_serving: true once the chief has come, and may need this task.
    """

    def __init__(self, task: Task, grace_secs: float, names: Collection[str] = STOP_SIGNALS) -> None:
        super().__init__(grace_secs, names)
        self.is_serving = False
        self._task = task
        self._leave: Callable[[], None] = lambda: None

    def begin_to_serve(self, leave: Callable[[], None] = lambda: None) -> None:
        """From now on the chief may need this task, and is asked by `leave` to do without it at a signal."""
        self._raise_again()
        self._leave = leave
        self.is_serving = True

    def _raise_again(self) -> None:
        if self.received is not None and not self.is_serving:
            raise SystemExit(0)

    def _stop(self, received: signal.Signals) -> None:
        if not self.is_serving:
            log.say(f"done  | {self._task} | stopped by {received.name} before the chief started")
            raise SystemExit(0)
        at_most = f"at most {self._grace_secs:g} s"
        warn(f"{self._task}: {received.name}; it serves until the chief has saved, or does without it, {at_most}")
        late = f"{self._task}: the chief has not ended {self._grace_secs:g} s after {received.name} (run.grace_secs)"
        self._leave_in_time(received, lambda: late, at_once=self._leave)


_of_task: list[TaskSignals] = []


@contextmanager
def task_signals(task: Task, grace_secs: float, names: Collection[str] = STOP_SIGNALS) -> Iterator[TaskSignals]:
    """`TaskSignals`; nested calls share one: the command line enters it before the functions that it calls."""
    if _of_task:
        yield _of_task[0]
        return
    with TaskSignals(task, grace_secs, names) as signals:
        _of_task.append(signals)
        try:
            yield signals
        finally:
            _of_task.clear()


def leave(received: signal.Signals) -> None:
    """Ends the process at once."""
    if exit_at_once is not None:
        exit_at_once(exit_code_of(received))
    _raise(received)


def _raise(received: signal.Signals) -> NoReturn:
    raise KeyboardInterrupt if received is signal.SIGINT else SystemExit(exit_code_of(received))
