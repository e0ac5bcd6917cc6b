"""Children that the user's code makes of this process: a pool of processes, the workers of a DataLoader, `os.fork`.

A forked child inherits everything that its parent has. What acts for the run is taken from it as soon as it is forked:
handlers of signals, pipes that keep tasks running, the live line. `subprocess` inherits none of this.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import HasFileno

#: Schedulers and terminals send them to end a process, or to announce it.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_END_SECS = 2.0


_undoing: list[Callable[[], None]] = []
_pipes: weakref.WeakSet[HasFileno] = weakref.WeakSet()
_of_thread = threading.local()


def undo_in_children(function: Callable[[], None]) -> Callable[[], None]:
    """Calls a function in every child that is forked from now on; the last one that was passed is called first.

    Returns:
        Ends that.
    """
    _undoing.append(function)

    def cancel() -> None:
        with suppress(ValueError):
            _undoing.remove(function)

    return cancel


def keep_from_children(pipe: HasFileno) -> None:
    """Takes a pipe or socket from every child that is forked from now on: its other end waits until all have closed it.

    Args:
        pipe: any open file; a weak reference to it is kept.
    """
    _pipes.add(pipe)


@contextmanager
def hold_back_signals() -> Iterator[None]:
    """Lets signals wait that a child, started inside, is going to ignore; it inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def children_end_here() -> Iterator[None]:
    """Ends a child that the user's code forks inside, and leaves by an exception, as `multiprocessing` ends its own.

    Everything further out, such as the tasks, the run dir and its lock, is for this process to end.
    """
    own = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own:
            _end_child(error)
        raise


def end_daemons() -> None:
    """Ends the daemonic processes of `multiprocessing`, before a process ends without what Python does at its exit."""
    if "multiprocessing" not in sys.modules:
        return
    import multiprocessing

    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    deadline = time.monotonic() + _END_SECS
    for process in daemons:
        process.join(max(0.0, deadline - time.monotonic()))


def _end_child(error: BaseException) -> NoReturn:
    code = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        print(error.code, file=sys.stderr)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _hold_signals() -> None:
    # Python would drop a signal that reaches a child before its handlers are its own.
    _of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _of_thread.mask)


def _in_child() -> None:
    try:
        for function in reversed(_undoing):
            function()
        _undoing.clear()
        if _pipes:
            _leave_pipes()
    finally:
        _let_signals_through()


def _leave_pipes() -> None:
    # The descriptors stay open: one that is closed twice could be another file by then.
    with suppress(OSError), open(os.devnull, "r+b", buffering=0) as nothing:
        for pipe in list(_pipes):
            # It may be closed.
            with suppress(OSError, ValueError):
                os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_through, after_in_child=_in_child)
