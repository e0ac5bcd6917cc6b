"""How tasks that were started one by one learn that their chief has finished: by a queue that each of them reads from.

TensorFlow's servers cannot be stopped. In TF1 programs, every parameter server waited at a queue ("done queue") until
the chief had put an element into it. kdist does the same with a shared queue on the chief's server, but the chief
closes it, which every waiting task notices, and reads the names of those that did from a second queue: an element might
be taken by the read of a task that fell silent long ago. A third queue is closed before if the chief was told to
stop before the end of the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import TimeoutError
from contextlib import contextmanager, suppress

import tensorflow as tf

from kdist.cluster.network.port_probe import PortProbes
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError
from kdist.threads import in_thread

_POLL_SECS = 0.2
_LAST_WORD_SECS = 1.0
#: A task that has lost its chief can only exit; it should have exited when `patience` is over.
_EXIT_SECS = 1.5
_DONE, _NOTED, _STOPPED = "kdist_done", "kdist_noted", "kdist_stopped"
_MAX_TASKS = 1 << 20


def chief_server(spec: ClusterSpec) -> tuple[str, Task]:
    """Address and task of the server that belongs to the chief: its own, or that of worker 0, which it also is."""
    return (spec.chief, Task("chief", 0)) if spec.chief else (spec.worker[0], Task("worker", 0))


class Chief:
    """The chief, as seen by a server or worker.

    Args:
        spec: the cluster.
        who: what this process is.
        patience: seconds of silence after which the tasks of a lost chief have exited.
    """

    def __init__(self, spec: ClusterSpec, who: Task, patience: float) -> None:
        self._address, self._task = chief_server(spec)
        self._who = who
        self._patience = patience
        self._probes = PortProbes({self._task: self._address}, max(patience - _EXIT_SECS, patience / 2))

    def __str__(self) -> str:
        return f"{self._task} at {self._address}"

    def wait_for_it(self, timeout: float) -> None:
        """Waits until the chief serves.

        Raises:
            ClusterError: it did not serve within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._probes.listening():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{self._who}: the chief ({self}) did not respond within {timeout:g} s (cluster.start_timeout): "
                    f"{self._probes.found().get(self._task, 'no answer yet')}"
                )
            time.sleep(_POLL_SECS)

    def wait_until_done(self) -> bool:
        """Returns when the chief reports that it has finished: whether the run is at its end, and was not stopped.

        Raises:
            ClusterError: it exited without reporting completion, or is silent for too long.
        """
        is_done = threading.Event()
        was_stopped: list[bool] = []

        def wait() -> None:
            session, done, noted, stopped = _session(self._address, self._task)
            with session.graph.as_default():
                with suppress(tf.errors.OutOfRangeError):
                    session.run(done.dequeue())
                was_stopped.append(bool(session.run(stopped.is_closed())))
                is_done.set()
                session.run(noted.enqueue(str(self._who)))

        outcome = in_thread(wait)
        failing_since: float | None = None
        while True:
            # A machine that is switched off closes no connection.
            lost = self._probes.lost()
            # The report of a chief that has just exited may still be on its way.
            if is_done.wait(_LAST_WORD_SECS if self._probes.refusing() else _POLL_SECS):
                with suppress(TimeoutError, tf.errors.OpError):
                    # Its server exits as soon as the last task has acknowledged, and TensorFlow may wait for its
                    # response for ever.
                    outcome.result(_LAST_WORD_SECS)
                return not was_stopped[0]
            if not outcome.done():
                failing_since = None
                if not lost:
                    continue
            elif not isinstance(outcome.exception(), tf.errors.OpError):
                outcome.result()
            if self._task in self._probes.refusing():
                raise ClusterError(f"{self._who}: the chief ({self}) exited without reporting completion")
            if lost:
                raise ClusterError(f"{self._who}: the chief ({self}) is lost ({lost[self._task]})")
            # The connection has ended although the last probe found the chief: a network was down for a moment, or the
            # chief has exited since, which the next probe finds out.
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > self._patience:
                raise ClusterError(f"{self._who}: the chief ({self}) responds, but not to this task")
            time.sleep(_POLL_SECS)
            outcome = in_thread(wait)

    def stop(self) -> None:
        """Stops watching the chief."""
        self._probes.stop()


def tell_tasks(spec: ClusterSpec, tasks: Collection[Task], timeout: float, *, run_goes_on: bool) -> set[str]:
    """Tells the waiting tasks that the chief has finished, and gives them `timeout` seconds to acknowledge.

    Args:
        tasks: those that can acknowledge.
        run_goes_on: whether the chief was told to stop before the end of the run.

    Returns:
        The names of the tasks that did not.
    """
    missing = {str(task) for task in tasks}
    address, chief = chief_server(spec)

    def tell() -> None:
        session, done, noted, stopped = _session(address, chief)
        with session.graph.as_default():
            if run_goes_on:
                session.run(stopped.close())
            session.run(done.close())
            name = noted.dequeue()
            while missing:
                missing.discard(session.run(name).decode())

    with suppress(TimeoutError, tf.errors.OpError):
        in_thread(tell).result(timeout)
    return missing


class _Session(tf.compat.v1.Session):
    """Is never closed, not even by Python's garbage collection: TensorFlow would wait for a server that has exited."""

    def __del__(self) -> None:
        pass


def _session(
    address: str, task: Task
) -> tuple[tf.compat.v1.Session, tf.queue.FIFOQueue, tf.queue.FIFOQueue, tf.queue.FIFOQueue]:
    """A session on a server, and the queues there."""
    with server_session(address, task) as session:
        done, noted, stopped = (
            tf.queue.FIFOQueue(_MAX_TASKS, [tf.string], [()], shared_name=name) for name in (_DONE, _NOTED, _STOPPED)
        )
    return session, done, noted, stopped


@contextmanager
def server_session(address: str, task: Task) -> Iterator[tf.compat.v1.Session]:
    """A session on a server; what is built inside the context is in its graph, and on that server."""
    device = f"/job:{task.job}/replica:0/task:{task.index}"
    graph = tf.Graph()
    # The other tasks of the cluster need not be there.
    config = tf.compat.v1.ConfigProto(device_filters=[device])
    with graph.as_default(), tf.device(f"{device}/device:CPU:0"):
        yield _Session(f"grpc://{address}", graph=graph, config=config)
