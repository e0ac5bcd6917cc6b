"""`Profiler`: the time that tasks spend in each operation. After `tf.compat.v1.train.ProfilerHook`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.config.checks import check_whole_number
from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.log import warn
from kdist.threads import in_thread

if TYPE_CHECKING:
    from kdist.cluster.spec import Task

_ANSWER_SECS = 30.0
_SUFFIX = ".xplane.pb"


class Profiler(TimedHook):
    """Traces the chief and every task of the cluster for a moment at intervals, with TensorFlow's profiler.

    TensorBoard shows each trace under Profile as a session with all tasks as its hosts, if its plugin
    `tensorboard-plugin-profile` is installed. Do not use it to measure speed.

    Args:
        every_steps: steps between two traces.
        every_secs: seconds between two traces.
        output_dir: folder for the traces; `tb/train` in the run dir if None.
        duration_ms: the shortest duration of a trace; at least 1.
        clock: returns seconds; replaced in tests.

    Raises:
        ConfigError: neither `every_steps` nor `every_secs` is given, or a value is out of range.
    """

    _owner = "Profiler"

    def __init__(
        self,
        every_steps: int | None = None,
        every_secs: float | None = None,
        output_dir: str | None = None,
        duration_ms: int = 500,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_whole_number("Profiler.duration_ms", duration_ms, required=True)
        super().__init__(every_steps, every_secs, clock)
        self._output_dir = output_dir
        self._duration_ms = duration_ms
        self._clock = clock
        self._trace: ExitStack | None = None
        self._ends_at = 0.0

    def after_create_session(self, session: Session) -> None:
        self.close()
        super().after_create_session(session)

    def before_run(self, context: RunContext) -> None:
        if self._trace is None and self._timer.due(context.global_step):
            session = context.session
            folder = Path(self._output_dir) if self._output_dir else session.run_dir / "tb" / "train"
            self._trace = ExitStack()
            self._trace.enter_context(_trace(folder, session.strategy.addresses, self._duration_ms))
            self._ends_at = self._clock() + self._duration_ms / 1000

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._trace is not None and self._clock() >= self._ends_at:
            self.close()
            self._timer.restart(values.global_step)

    def end(self, session: Session) -> None:
        self.close()

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None


@contextmanager
def _trace(folder: Path, addresses: Mapping[Task, str], duration_ms: int) -> Iterator[None]:
    """Traces this process during the block, and the tasks at `addresses` for `duration_ms` from its start."""
    import tensorflow as tf

    profiler = tf.profiler.experimental
    sessions = folder / "plugins" / "profile"
    earlier = set(sessions.glob("*"))
    others = ",".join(f"grpc://{address}" for address in addresses.values())
    # It fails if this process is being traced already.
    is_on = _succeeds(profiler.start, str(folder))
    traces = []
    if is_on and addresses:
        traces = [in_thread(partial(_succeeds, profiler.client.trace, others, str(folder), duration_ms))]
    try:
        yield
    finally:
        wait(traces, _ANSWER_SECS)
        if is_on:
            _succeeds(profiler.stop)
            # If that fails, they stay as TensorFlow has left them.
            with suppress(OSError):
                _bring_together(sorted(set(sessions.glob("*")) - earlier), addresses)


def _bring_together(sessions: Sequence[Path], addresses: Mapping[Task, str]) -> None:
    """Merges the files of the chief and of the others into one session, and names each host after its task."""
    # TensorFlow names its files after the machine and the addresses.
    names = {address.replace(":", "_"): str(task).replace(":", "-") for task, address in addresses.items()}
    names[socket.gethostname()] = "chief"
    for file in [file for session in sessions for file in session.glob(f"*{_SUFFIX}")]:
        name = names.get(file.name.removesuffix(_SUFFIX))
        # Other programs may write traces there, too.
        if name is not None and not (called := sessions[0] / f"{name}{_SUFFIX}").exists():
            file.rename(called)
    for session in sessions[1:]:
        with suppress(OSError):
            session.rmdir()


def _succeeds(function: Callable[..., Any], *arguments: Any) -> bool:
    """Calls a function of the profiler; a failure costs a warning."""
    import tensorflow as tf

    try:
        function(*arguments)
    except tf.errors.OpError as error:
        warn(f"Profiler: no trace: {str(error).splitlines()[0]}")
        return False
    return True
