"""The rendezvous of tasks that were started one by one with their chief, by queues on the chief's server.

At the beginning, the chief lays its fingerprint out in a staging area, whose elements can be read without being taken
away. Every other task compares it with its own, and reports the outcome to a queue, which the chief reads. So a
difference is known to both, and to a task that is started later as well.

At the end, the chief closes a queue from which all tasks read. TensorFlow's servers cannot be stopped: in TF1 programs,
every parameter server waited at such a queue ("done queue") for an element. Closing it, every waiting task notices; an
element might be taken by the read of a task that fell silent long ago. A second queue has the names of the tasks that
noticed, and a third one is closed before if the chief was told to stop before the end of the run.

In between, a task asks for a place in a cluster that is training, or says that it was told to leave, by another queue.
The place, and that the chief does without it, come in a queue of its own: a task that is started again is another one.
All-reduce workers report again whenever the set of workers is to change, and get the next round by that queue; a queue
that is closed then ends the last round for those that still wait in it for a worker that is lost.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, TimeoutError, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import tensorflow as tf

from kdist._compat import op_libraries
from kdist.cluster.description import TaskFingerprint, differences, mismatch_error
from kdist.cluster.network.port_probe import PortProbes
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError, ConfigError
from kdist.threads import in_thread

_FINGERPRINT, _REPORTS = "kdist_description", "kdist_reports"
_ASKS, _ANSWER_TO, _ROUND = "kdist_asks", "kdist_answer_to_", "kdist_round_"
_DONE, _NOTED, _STOPPED = "kdist_done", "kdist_noted", "kdist_stopped"
_MAX_ELEMENTS = 1 << 20
_POLL_SECS = 0.2
_LEAST_SECS = 5.0
#: For others to report as well, after the first that differs.
_OTHERS_SECS = 10.0
_LAST_WORD_SECS = 1.0
#: A task that has lost its chief can only exit; it should have exited when `patience` is over.
_EXIT_SECS = 1.5


def chief_server(spec: ClusterSpec) -> tuple[str, Task]:
    """Address and task of the chief's server: if the chief is no separate task, it is worker 0."""
    return (spec.chief, Task("chief", 0)) if spec.chief else (spec.worker[0], Task("worker", 0))


class Chief:
    """The chief, as seen by the server or worker `who`; its tasks have exited after `patience` seconds of silence."""

    def __init__(self, spec: ClusterSpec, who: Task, patience: float) -> None:
        self._address, self._task = chief_server(spec)
        self._who, self._patience, self._name = who, patience, _new_name()
        self._probes = PortProbes({self._task: self._address}, max(patience - _EXIT_SECS, patience / 2))
        #: The answer of the chief to this task, if there is one: that it does without it, or a round of all-reduce.
        self.answer: Mapping[str, Any] | None = None
        #: Whether this task has asked to leave.
        self.has_asked = False
        self._is_over = threading.Event()
        self._is_done, self._was_stopped = threading.Event(), False
        self._end: Future[None] | None = None

    def __str__(self) -> str:
        return f"{self._task} at {self._address}"

    def wait_for_it(self, timeout: float) -> None:
        """Waits until the chief serves; raises `ClusterError` if it does not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._probes.listening():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{self._who}: the chief ({self}) did not respond within {timeout:g} s (cluster.start_timeout): "
                    f"{self._probes.found()[self._task] or 'no answer yet'}"
                )
            time.sleep(_POLL_SECS)

    @property
    def has_left(self) -> bool:
        """True if the chief does without this task."""
        return self.answer is not None and "left" in self.answer

    def compare(self, fingerprint: TaskFingerprint, timeout: float, *, again: bool = False) -> None:
        """Compares this task with the chief, which serves, and loads the libraries of ops that the chief has loaded.

        Args:
            again: whether it has done so before: then it ends when the chief has finished, or exited.

        Raises `ConfigError` if they differ, and `ClusterError` if the chief does not report within `timeout` seconds.
        """
        deadline = time.monotonic() + max(timeout, _LEAST_SECS)

        def exchange() -> list[str]:
            with _server_session(self._address, self._task) as session:
                size = tf.raw_ops.StageSize(dtypes=[tf.string], shared_name=_FINGERPRINT)
                peek = tf.raw_ops.StagePeek(index=0, dtypes=[tf.string], shared_name=_FINGERPRINT)
                # One that waits keeps a thread of the server, which has few, from laying the fingerprint out.
                while not session.run(size):
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    time.sleep(_POLL_SECS)
                of_chief = TaskFingerprint.from_json(session.run(peek)[0])
                found = differences(of_chief, fingerprint)
                if not found:
                    op_libraries.load(of_chief.op_libraries)
                session.run(_queue(_REPORTS).enqueue(json.dumps([str(self._who), self._name, found])))
                return found

        while time.monotonic() < deadline:
            outcome = in_thread(exchange)
            while not outcome.done() and time.monotonic() < deadline and not (again and self._is_over_there()):
                wait([outcome], _POLL_SECS)
            # A chief that has just exited fails the call; another one may come.
            with suppress(TimeoutError, tf.errors.OpError):
                if found := outcome.result(0):
                    raise mismatch_error({str(self._who): found})
                return
            if again and self._is_over_there():
                return
            time.sleep(_POLL_SECS)
        raise ClusterError(
            f"{self._who}: the chief ({self}) did not report its versions and config within {timeout:g} s "
            "(cluster.start_timeout); it may run another kdist version"
        )

    def _is_over_there(self) -> bool:
        return self._is_done.is_set() or self._task in self._probes.lost()

    def wait_until_done(self) -> bool:
        """Waits until the chief has finished, or has given this task an `answer`; False if it was told to stop.

        Raises `ClusterError` if it is lost.
        """
        self.answer = None
        # It waits through all rounds.
        outcome = self._end = self._end or in_thread(self._wait_for_end)
        _ = in_thread(self._hear)
        failing_since: float | None = None
        while True:
            if self.answer is not None:
                return True
            # A machine that is switched off closes no connection.
            lost = self._probes.lost()
            # The report of a chief that has just exited may still be on its way.
            if self._is_done.wait(_LAST_WORD_SECS if self._probes.refusing() else _POLL_SECS):
                with suppress(TimeoutError, tf.errors.OpError):
                    # Its server exits as soon as the last task has acknowledged, and TensorFlow may wait for its
                    # response for ever.
                    outcome.result(_LAST_WORD_SECS)
                return not self._was_stopped
            if not outcome.done():
                failing_since = None
                if not lost:
                    continue
            elif not isinstance(outcome.exception(), tf.errors.OpError):
                outcome.result()
            if self._task in self._probes.refusing():
                raise self._exited()
            if lost:
                raise ClusterError(f"{self._who}: the chief ({self}) is lost ({lost[self._task]})")
            # The connection has ended although the last probe found the chief: a network was down for a moment, or the
            # chief has exited since, which the next probe finds out.
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > self._patience:
                raise ClusterError(f"{self._who}: the chief ({self}) responds, but not to this task")
            time.sleep(_POLL_SECS)
            outcome = self._end = in_thread(self._wait_for_end)

    def _wait_for_end(self) -> None:
        with _server_session(self._address, self._task) as session:
            done, noted, stopped = map(_queue, (_DONE, _NOTED, _STOPPED))
            with suppress(tf.errors.OutOfRangeError):
                session.run(done.dequeue())
            self._was_stopped = bool(session.run(stopped.is_closed()))
            self._is_done.set()
            session.run(noted.enqueue(str(self._who)))

    def at_end_of_round(self, number: int, function: Callable[[], None]) -> None:
        """Calls a function in a thread when the chief has ended a round, or is lost: a collective may wait for ever."""

        def wait_for_close() -> None:
            with _server_session(self._address, self._task) as session, suppress(tf.errors.OutOfRangeError):
                session.run(_queue(f"{_ROUND}{number}").dequeue())

        def wait_for_end() -> None:
            outcome = in_thread(wait_for_close)
            while not self._is_over.wait(_POLL_SECS) and self._task not in self._probes.lost():
                if outcome.done() and outcome.exception() is None:
                    break
                # A network was down for a moment.
                outcome = in_thread(wait_for_close) if outcome.done() else outcome
            function()

        _ = in_thread(wait_for_end)

    def _exited(self) -> ClusterError:
        return ClusterError(f"{self._who}: the chief ({self}) exited without reporting completion")

    def ask_to_leave(self) -> None:
        """Asks the chief to do without this task, and ends `wait_until_done` when it does; returns at once."""

        def ask() -> None:
            with suppress(tf.errors.OpError), _server_session(self._address, self._task) as session:
                session.run(_queue(_ASKS).enqueue(json.dumps({"leave": str(self._who)})))

        self.has_asked = True
        _ = in_thread(ask)

    def _hear(self) -> None:
        """Hears that the chief does without this task, or another answer that it has not asked for by itself."""
        while not self._is_over.is_set():
            with suppress(tf.errors.OpError), _server_session(self._address, self._task) as session:
                self.answer = json.loads(session.run(_queue(f"{_ANSWER_TO}{self._name}").dequeue()))
                return
            self._is_over.wait(_POLL_SECS)

    def stop(self) -> None:
        self._is_over.set()
        self._probes.stop()


def _new_name() -> str:
    """A name that no other process has."""
    return uuid.uuid4().hex[:12]


def ask_for_place(chief: str, job: str, address: str, timeout: float) -> tuple[ClusterSpec, Task]:
    """Asks the chief of a cluster that is training for a place.

    Args:
        chief: address of the chief's server.
        job: `worker` or `ps`.
        address: of this task.

    Returns:
        The cluster, and the place.

    Raises:
        ConfigError: the chief refuses.
        ClusterError: it does not answer in `timeout` seconds.
    """
    name = _new_name()
    asked = json.dumps({"join": name, "job": job, "address": address})

    def ask(task: Task) -> dict[str, Any]:
        with _server_session(chief, task) as session:
            session.run(_queue(_ASKS).enqueue(asked))
            answer: dict[str, Any] = json.loads(session.run(_queue(f"{_ANSWER_TO}{name}").dequeue()))
            return answer

    deadline = time.monotonic() + timeout
    why = "no answer yet"
    while time.monotonic() < deadline:
        # Without a separate chief, the server is that of worker 0.
        for task in (Task("chief", 0), Task("worker", 0)):
            try:
                answer = in_thread(partial(ask, task)).result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                break
            except tf.errors.InvalidArgumentError:
                continue
            except tf.errors.OpError as error:
                why = error.message.splitlines()[0]
                break
            if "error" in answer:
                raise ConfigError(answer["error"])
            spec = ClusterSpec(tuple(answer["ps"]), tuple(answer["worker"]), answer["chief"])
            return spec, Task(job, answer["index"])
        time.sleep(_POLL_SECS)
    raise ClusterError(
        f"the chief at {chief} has given this {job} no place within {timeout:g} s (cluster.start_timeout): {why}"
    )


class AskedByTasks:
    """The chief's side of `ask_for_place` and `Chief.ask_to_leave`, once its server serves.

    Attributes:
        joining: the name, the job and the address of tasks that wait for a place.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self.joining: list[tuple[str, str, str]] = []
        #: A task whose connection ends before it has its answer asks again.
        self._known: set[str] = set()
        self._leaving: set[Task] = set()
        #: The names of queues, and what they get; None closes one. Another None ends the thread that sends them.
        self._answers: queue.SimpleQueue[tuple[str, Mapping[str, Any] | None] | None] = queue.SimpleQueue()
        _ = in_thread(self._read), in_thread(self._write)

    def leaving(self) -> set[Task]:
        """The tasks that were told to leave since this was called last."""
        leaving, self._leaving = self._leaving, set()
        return leaving

    def answer(self, name: str, answer: Mapping[str, Any]) -> None:
        """Answers a task; returns at once."""
        self._answers.put((f"{_ANSWER_TO}{name}", answer))

    def end_round(self, number: int) -> None:
        """Ends a round for the workers that wait in it; returns at once."""
        self._answers.put((f"{_ROUND}{number}", None))

    def refuse(self, why: str) -> None:
        """Refuses all tasks that wait for a place."""
        for waiting in list(self.joining):
            self.joining.remove(waiting)
            self.answer(waiting[0], {"error": why})

    def stop(self) -> None:
        """Sends what is to be sent, and nothing after it."""
        self._answers.put(None)

    def _read(self) -> None:
        with _server_session(*chief_server(self._spec)) as session:
            ask = _queue(_ASKS).dequeue()
            while True:
                asked = json.loads(session.run(ask))
                if "leave" in asked:
                    job, _, index = asked["leave"].partition(":")
                    self._leaving = self._leaving | {Task(job, int(index))}
                elif asked["join"] not in self._known:
                    self._known.add(asked["join"])
                    self.joining.append((asked["join"], asked["job"], asked["address"]))

    def _write(self) -> None:
        while (item := self._answers.get()) is not None:
            name, answer = item
            with suppress(tf.errors.OpError), _server_session(*chief_server(self._spec)) as session:
                to = _queue(name)
                session.run(to.close() if answer is None else to.enqueue(json.dumps(answer)))


class VersionCheck:
    """The chief's side of `Chief.compare`, once its server serves."""

    def __init__(self, spec: ClusterSpec, fingerprint: TaskFingerprint) -> None:
        self._spec, self._fingerprint = spec, fingerprint
        #: The report of each task, empty for one that agrees, and the name by which it is answered.
        self._reported: dict[str, list[str]] = {}
        self._names: dict[str, str] = {}
        self._differs_since: float | None = None
        self._reading = in_thread(self._work)

    def missing(self, tasks: Collection[Task]) -> set[Task]:
        """The tasks that have not reported yet; raises `ConfigError` if some differ, once others had time to report."""
        if self._reading.done():
            raise ClusterError(f"the reports of the tasks cannot be read: {self._reading.exception()}")
        missing = {task for task in tasks if str(task) not in self._reported}
        if found := self.mismatches:
            self._differs_since = self._differs_since or time.monotonic()
            if not missing or time.monotonic() - self._differs_since > _OTHERS_SECS:
                raise mismatch_error(found)
        return missing

    def forget(self, task: Task) -> str | None:
        """Waits for another report from a place that another process takes; returns the name of the last one."""
        self._reported.pop(str(task), None)
        return self._names.pop(str(task), None)

    def has_reported(self, task: Task) -> bool:
        return str(task) in self._reported

    @property
    def mismatches(self) -> dict[str, list[str]]:
        return {task: found for task, found in dict(self._reported).items() if found}

    def _work(self) -> None:
        with _server_session(*chief_server(self._spec)) as session:
            lay_out = tf.raw_ops.Stage(values=[tf.constant(self._fingerprint.to_json())], shared_name=_FINGERPRINT)
            report = _queue(_REPORTS).dequeue()
            session.run(lay_out)
            while True:
                task, name, found = json.loads(session.run(report))
                self._names[task], self._reported[task] = name, found


def tell_tasks(spec: ClusterSpec, tasks: Collection[Task], timeout: float, *, will_resume: bool) -> set[str]:
    """Tells waiting tasks that the chief has finished; returns those that do not acknowledge in `timeout` seconds."""
    missing = {str(task) for task in tasks}

    def tell() -> None:
        with _server_session(*chief_server(spec)) as session:
            done, noted, stopped = map(_queue, (_DONE, _NOTED, _STOPPED))
            if will_resume:
                session.run(stopped.close())
            session.run(done.close())
            name = noted.dequeue()
            while missing:
                missing.discard(session.run(name).decode())

    with suppress(TimeoutError, tf.errors.OpError):
        in_thread(tell).result(timeout)
    return missing


class _Session(tf.compat.v1.Session):
    """A session that is never closed, not even as garbage: TensorFlow would wait for a server that has exited."""

    def __del__(self) -> None:
        pass


@contextmanager
def _server_session(address: str, task: Task) -> Iterator[tf.compat.v1.Session]:
    """A session on a server; the block builds its ops in the graph of the session, on that server."""
    device = f"/job:{task.job}/replica:0/task:{task.index}"
    graph = tf.Graph()
    # The other tasks of the cluster need not be there.
    config = tf.compat.v1.ConfigProto(device_filters=[device])
    with graph.as_default(), tf.device(f"{device}/device:CPU:0"):
        yield _Session(f"grpc://{address}", graph=graph, config=config)


def _queue(name: str) -> tf.queue.FIFOQueue:
    return tf.queue.FIFOQueue(_MAX_ELEMENTS, [tf.string], [()], shared_name=name)
