"""`Profiler`: the time that tasks spend in each operation. After `tf.compat.v1.train.ProfilerHook`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kdist.errors import ConfigError
from kdist.hooks.base import RunContext, RunValues, Session
from kdist.hooks.timer import TimedHook
from kdist.log import warn

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

    def __init__(
        self,
        every_steps: int | None = None,
        every_secs: float | None = None,
        output_dir: str | None = None,
        duration_ms: int = 500,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if duration_ms < 1:
            raise ConfigError(f"Profiler.duration_ms={duration_ms}: must be at least 1")
        super().__init__(every_steps, every_secs, "Profiler", clock=clock)
        self._output_dir = output_dir
        self._duration_ms = duration_ms
        self._clock = clock
        self._trace: _Trace | None = None
        self._ends_at = 0.0

    def after_create_session(self, session: Session) -> None:
        self.close()
        super().after_create_session(session)

    def before_run(self, context: RunContext) -> None:
        if self._trace is None and self._timer.due(context.global_step):
            session = context.session
            folder = Path(self._output_dir) if self._output_dir else session.run_dir / "tb" / "train"
            self._trace = _Trace(folder, session.strategy.addresses, self._duration_ms)
            self._ends_at = self._clock() + self._duration_ms / 1000

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._trace is not None and self._clock() >= self._ends_at:
            self.close()
            self._timer.restart(values.global_step)

    def end(self, session: Session) -> None:
        self.close()

    def close(self) -> None:
        if self._trace is not None:
            self._trace.end()
            self._trace = None


class _Trace:
    """A trace that starts now."""

    def __init__(self, folder: Path, addresses: Mapping[Task, str], duration_ms: int) -> None:
        import tensorflow as tf

        self._profiler = tf.profiler.experimental
        self._others: threading.Thread | None = None
        self._is_on = False
        self._sessions = folder / "plugins" / "profile"
        self._earlier = set(self._sessions.glob("*"))
        # TensorFlow names its files after the machine and the addresses.
        self._names = {address.replace(":", "_"): str(task).replace(":", "-") for task, address in addresses.items()}
        self._names[socket.gethostname()] = "chief"
        # It fails if this process is being traced already.
        with _failure_warns():
            self._profiler.start(str(folder))
            self._is_on = True
        if self._is_on and addresses:
            services = ",".join(f"grpc://{address}" for address in addresses.values())
            arguments = [services, str(folder), duration_ms]
            self._others = threading.Thread(target=self._trace_others, args=arguments, daemon=True)
            self._others.start()

    def _trace_others(self, services: str, folder: str, duration_ms: int) -> None:
        with _failure_warns():
            self._profiler.client.trace(services, folder, duration_ms)

    def end(self) -> None:
        if self._others is not None:
            self._others.join(_ANSWER_SECS)
        if self._is_on:
            with _failure_warns():
                self._profiler.stop()
            # If that fails, they stay as TensorFlow has left them.
            with suppress(OSError):
                self._bring_together()

    def _bring_together(self) -> None:
        """Merges the files of the chief and of the others into one session, and names each host after its task."""
        sessions = sorted(set(self._sessions.glob("*")) - self._earlier)
        for file in [file for session in sessions for file in session.glob(f"*{_SUFFIX}")]:
            name = self._names.get(file.name.removesuffix(_SUFFIX))
            # Other programs may write traces there, too.
            if name is not None and not (called := sessions[0] / f"{name}{_SUFFIX}").exists():
                file.rename(called)
        for session in sessions[1:]:
            with suppress(OSError):
                session.rmdir()


@contextmanager
def _failure_warns() -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        warn(f"Profiler: no trace: {str(error).splitlines()[0]}")
