"""The chief's side of a cluster: sends calls to workers, and never waits for them without a bound.

In the place of TensorFlow's `ClusterCoordinator`, which hangs when a task is stopped, when all workers are lost and
while a lost worker is away. Calls run on workers by TensorFlow's remote execution, as there; who calls whom, and what
becomes of the calls of a lost worker, is decided here, in sight.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context

from kdist.cluster.connection import connect, disconnect, reconnect
from kdist.cluster.first_calls import first_calls
from kdist.cluster.lanes import OUT_OF_REACH, Call, Calls, Finished, Lane, QuietExecutor, may_be_lost
from kdist.cluster.signs_of_life import ask
from kdist.cluster.spec import Task
from kdist.cluster.supervisor import Supervisor, describe_lost
from kdist.errors import ClusterError
from kdist.warn import warn

T = TypeVar("T")

_CHECK_SECS = 0.5
_ANSWER_SECS = 10.0
_ABANDON_SECS = 2.0
_TRIES = 3
_ENVIRONMENT = {
    # Tasks that are connected all serve already: one that is gone is an error, and not something to wait for.
    "GRPC_FAIL_FAST": "true",
    # Calls are sent one by one and come back when they are done.
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False",
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": "True",
}


class CallsGivenUp(Exception):
    """Calls in flight took too long after an interruption."""


class Coordinator:
    """Sends calls to workers and hands out what they return.

    A call is a Python function of the worker's index; it runs in a thread of its worker's own, in the scope of that
    worker's device, and calls TensorFlow functions.

    Args:
        supervisor: says which tasks serve; asked while waiting.
        timeout: seconds without any result before unresponsive tasks are looked for.
        grace_secs: seconds that calls in flight have to end after an interruption.

    Attributes:
        interrupted: says whether training is to end.
        num_lost: how often a worker was lost.
        on_return: called with the index of a worker that is back: a new process, which has nothing but the functions
            that were traced.

    Raises:
        tf.errors.UnavailableError: here, when a task does not answer.
        ClusterError: from whatever waits: a parameter server or the last worker is lost, or nothing happened for
            `timeout` seconds.
    """

    def __init__(self, supervisor: Supervisor, *, timeout: float, grace_secs: float) -> None:
        self._supervisor = supervisor
        self._spec = tf.train.ClusterSpec(supervisor.spec.jobs)
        self._timeout = timeout
        self._workers = range(len(supervisor.spec.worker))
        self._grace_secs = grace_secs
        self._interrupted_at: float | None = None
        self._has_given_up = False
        self.interrupted: Callable[[], bool] = lambda: False
        self.num_lost = 0
        self.on_return: Callable[[int], None] | None = None
        self._retired: set[int] = set()
        #: Workers that are to begin later.
        self._waiting: set[int] = set()
        self._finished: queue.SimpleQueue[tuple[Call, Finished]] = queue.SimpleQueue()
        self._lanes: dict[int, Lane] = {}
        self._calls = Calls(self._workers)
        #: Connected workers whose calls failed because their hosts do not respond; they get none until they do.
        self._away: set[int] = set()
        #: Failures of a worker that is there, since its last result.
        self._failures = dict.fromkeys(self._workers, 0)
        self._last_check = time.monotonic()
        self._environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        # Functions that are garbage already would be looked for on every task, which knows nothing of them.
        gc.collect()
        first_calls.forget()
        try:
            connect(self._spec, supervisor.chief_address)
        except BaseException:
            _set_environment(self._environment)
            raise

    @property
    def present(self) -> list[int]:
        """Indices of the workers that take calls."""
        return [worker for worker in self._workers if worker in self._calls.present]

    def submit(self, function: Callable[[int], Any], tag: Any = None) -> None:
        """Has `function` called for the next free worker, and again for another one if that is lost meanwhile.

        Args:
            function: worker index -> anything.
            tag: comes back with the outcome.
        """
        self._calls.put(Call(function, tag, is_shared=True))
        self._start_lanes()

    def start_on(self, worker: int, function: Callable[[int], Any], tag: Any = None) -> None:
        """Has `function` called for one worker; calls for one worker follow each other."""
        self._calls.put(Call(function, tag, is_shared=False), worker)
        self._start_lanes()

    def next_finished(self) -> Finished:
        """Waits for a call to end, watching the tasks meanwhile.

        Calls of `submit` whose worker is lost do not end; those of `start_on` do, and `is_lost` says so.

        Raises:
            ClusterError: see the class.
        """
        while True:
            call, finished = self._wait(self._take_finished)
            error = finished.outcome.exception()
            if not may_be_lost(error):
                self._failures[finished.worker] = 0
                return finished
            self._has_failed(finished.worker, error)
            if not call.is_shared:
                return finished
            self._calls.put(call, first=True)

    def is_lost(self, finished: Finished) -> bool:
        """Whether a call of `start_on` failed because its worker is lost."""
        return may_be_lost(finished.outcome.exception())

    def retire(self, worker: int) -> bool:
        """Gives no more calls to a worker, which has nothing to do, until it is another process.

        Returns:
            Whether that is new: it may have begun another call meanwhile.
        """
        self._calls.rest(worker)
        is_new = worker not in self._retired
        self._retired.add(worker)
        return is_new

    def employ(self, workers: Collection[int]) -> None:
        """Gives calls to these workers only, from now on; the others finish what they have begun."""
        self._waiting = set(self._workers) - set(workers)
        for worker in self._workers:
            if worker in self._waiting:
                self._calls.rest(worker)
            elif worker in self._calls.connected and worker not in self._retired:
                self._calls.welcome(worker)

    def watch(self, function: Callable[[], T], kind: Hashable = None) -> T:
        """Runs what itself waits for tasks, watching them meanwhile; given up, it stays behind in its thread.

        Args:
            kind: stands for the TensorFlow functions that it calls; see `FirstCalls`.

        Raises:
            ClusterError: see the class.
        """
        outcome: Future[T] = Future()
        ended = threading.Event()

        def work() -> None:
            try:
                with first_calls.call(kind), context.executor_scope(QuietExecutor()):
                    outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised by `outcome.result`
                outcome.set_exception(error)
            ended.set()

        threading.Thread(target=work, daemon=True).start()
        self._wait(ended.wait)
        return outcome.result()

    def before_tracing(self) -> None:
        """Makes sure that every connected task answers: a new function is sent to all of them.

        TensorFlow waits for one that is stopped without a bound, and nothing else of this process runs meanwhile.

        Raises:
            ClusterError: a task does not answer, and it is not ours to replace.
        """
        while True:
            self.wait_for_silent()
            silent, _ = self._ask()
            if not silent:
                return
            self._replace(silent, f"did not answer within {_ANSWER_SECS:g} s")
            self.check_tasks()

    def wait_for_silent(self, job: str | None = None) -> None:
        """Waits while connected tasks, of one job if it is given, are silent: each comes back, or counts as lost.

        A run that is to end waits for no worker.

        Raises:
            ClusterError: see `check_tasks`.
        """
        while silent := {t for t in self._supervisor.silent() if job in (None, t.job)} & self._connected():
            if self.interrupted() and (workers := [task.index for task in silent if task.job == "worker"]):
                for worker in workers:
                    self._part_with(worker)
                continue
            time.sleep(_CHECK_SECS)
            self.check_tasks()

    def all_answer(self) -> bool:
        """Whether every connected task answers within a few seconds, if only that it is another process."""
        return not self._connected() & self._supervisor.silent() and not self._ask(_ABANDON_SECS)[0]

    def examine(self) -> None:
        """Finds out who is lost after something failed, and parts with workers that are.

        Raises:
            ClusterError: a parameter server is lost, or the last worker.
        """
        # Without servers there is nothing to do but to wait for them; a worker is not waited for.
        self.wait_for_silent("ps")
        _, broken = self._ask()
        if servers := [task for task in broken if task.job == "ps"]:
            lost = {task: how for task, how in self._supervisor.lost_soon().items() if task in servers}
            gone = dict.fromkeys(servers, "it is another process than it was")
            raise ClusterError(describe_lost(lost or gone))
        for task in broken:
            self._part_with(task.index)
        self.check_tasks()

    def check_tasks(self) -> None:
        """Parts with workers that are lost, and connects those that are back.

        Raises:
            ClusterError: a parameter server is lost, or no worker is left.
        """
        self._last_check = time.monotonic()
        if self._has_given_up:
            return
        serving = self._supervisor.check()
        for worker in self._workers:
            if worker not in serving and worker in self._calls.connected:
                self._part_with(worker)
        silent = {task.index for task in self._supervisor.silent() if task.job == "worker"}
        for worker in set(serving) - silent - self._retired - self._waiting:
            if worker not in self._calls.connected:
                self._welcome(worker)
            elif worker in self._away:
                # If it is another process by now, its next call says so.
                self._away.discard(worker)
                self._calls.welcome(worker)

    def wait_for_worker(self, timeout: float) -> bool:
        """Waits until a worker is back; returns whether one is.

        Raises:
            CallsGivenUp: training is to end.
            ClusterError: see the class.
        """
        before = set(self.present)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.interrupted():
                raise CallsGivenUp
            time.sleep(min(_CHECK_SECS, timeout))
            self.check_tasks()
            if set(self.present) - before:
                return True
        return False

    def stop(self) -> None:
        """Ends the threads and the connection.

        Whatever stood for something on the tasks (variables, functions, iterators) must have been let go before.
        """
        self._calls.stop()
        self._finished = queue.SimpleQueue()
        gc.collect()
        disconnect()
        _set_environment(self._environment)

    def _take_finished(self, timeout: float) -> tuple[Call, Finished] | None:
        with suppress(queue.Empty):
            return self._finished.get(timeout=timeout)
        return None

    def _wait(self, poll: Callable[[float], T | None]) -> T:
        """Calls `poll(timeout in seconds)` until it returns something that is true; returns that."""
        started, tries = time.monotonic(), 0
        while not (found := poll(min(_CHECK_SECS, self._timeout))):
            self._give_up_in_time()
            self.check_tasks()
            if time.monotonic() - started > self._timeout:
                # Who answers may have a long step to do, or its first one to prepare.
                tries = 0 if self._replace_silent() else tries + 1
                if tries == _TRIES:
                    raise ClusterError(
                        f"no task returned anything for {_TRIES} times {self._timeout:g} s (cluster.step_timeout); "
                        "every task is there and answers"
                    )
                started = time.monotonic()
        # Where results come all the time, nobody waits; tasks are looked after all the same.
        if time.monotonic() - self._last_check > _CHECK_SECS:
            self.check_tasks()
            if self._calls.longest_secs() > self._timeout:
                self._replace_silent()
        return found

    def _give_up_in_time(self) -> None:
        """Raises `CallsGivenUp` once, when an interruption is long ago; workers of this process's are killed then."""
        if not self.interrupted() or self._has_given_up:
            return
        self._interrupted_at = self._interrupted_at or time.monotonic()
        if time.monotonic() - self._interrupted_at > self._grace_secs:
            self._has_given_up = True
            # What they have begun must not go on while the parameters are read.
            self._supervisor.kill([Task("worker", worker) for worker in self._workers])
            self._calls.clear()
            self._finished = queue.SimpleQueue()
            raise CallsGivenUp

    def _replace_silent(self) -> bool:
        """Replaces the tasks that do not answer; False if all do.

        Raises:
            ClusterError: they are not ours to replace.
        """
        silent, _ = self._ask()
        if silent:
            self._replace(silent, f"did not answer for {self._timeout:g} s (cluster.step_timeout)")
        self._calls.forget_time()
        return bool(silent)

    def _replace(self, silent: Collection[Task], what: str) -> None:
        """Kills tasks that do not answer, but those whose hosts do not respond: they come back, or count as lost.

        Raises:
            ClusterError: they are not ours to kill.
        """
        silent = set(silent) - self._supervisor.silent()
        if not silent:
            return
        names = ", ".join(map(str, sorted(silent, key=str)))
        if not self._supervisor.kill(silent):
            if self.interrupted() and all(task.job == "worker" for task in silent):
                for task in silent:
                    self._part_with(task.index)
                return
            raise ClusterError(f"{names} {what}; stopped or out of reach")
        warn(f"{names} {what} and {'is' if len(silent) == 1 else 'are'} killed")

    def _ask(self, timeout: float = _ANSWER_SECS) -> tuple[set[Task], set[Task]]:
        """Asks every connected task for a sign of life, but those that do not respond at all; see `ask`."""
        return ask(self._connected() - self._supervisor.silent(), timeout)

    def _connected(self) -> set[Task]:
        servers = {task for task in self._supervisor.spec.shape.tasks if task.job == "ps"}
        return servers | {Task("worker", worker) for worker in self._calls.connected}

    def _has_failed(self, worker: int, error: BaseException | None) -> None:
        """Parts with a worker whose call failed, if it is lost; otherwise lets it try again.

        Raises:
            ClusterError: see the class.
            tf.errors.OpError: the worker is there, and its calls fail all the same.
        """
        self.examine()
        if worker in self._calls.connected:
            if Task("worker", worker) in self._supervisor.silent():
                self._away.add(worker)
                return
            self._failures[worker] += 1
            if self._failures[worker] > _TRIES and error is not None:
                raise error
            self._calls.welcome(worker)

    def _part_with(self, worker: int) -> None:
        self.num_lost += 1
        self._retired.discard(worker)
        self._away.discard(worker)
        for call in self._calls.part_with(worker):
            outcome: Future[Any] = Future()
            outcome.set_exception(tf.errors.UnavailableError(None, None, f"{Task('worker', worker)} is lost"))
            self._finished.put((call, Finished(worker, call.tag, outcome)))
        # What is in flight there fails now, and is done by others.
        self._supervisor.cut_off(Task("worker", worker))
        with suppress(*OUT_OF_REACH):
            self._reconnect()

    def _welcome(self, worker: int) -> None:
        """Connects a worker that serves again; it may take another try in a moment."""
        # Not asked before that: who is stopped between the question and the connection stops this process.
        with first_calls.call(None):
            if not self.all_answer():
                return
            self._supervisor.let_in(Task("worker", worker))
            try:
                self._reconnect(and_with=worker)
            except OUT_OF_REACH:
                return
        if self.on_return is not None:
            self.on_return(worker)
        self._calls.welcome(worker)

    def _reconnect(self, and_with: int | None = None) -> None:
        connected = {*self._calls.connected, and_with}
        with first_calls.call(None):
            reconnect(self._spec, [Task("worker", worker) for worker in self._workers if worker not in connected])
            first_calls.forget()

    def _start_lanes(self) -> None:
        for worker in self._workers:
            if worker not in self._lanes:
                self._lanes[worker] = Lane(worker, self._calls, self._finished)


def fetch(tensor: tf.Tensor) -> Any:
    """The value of a tensor of some task; the copy is an op, which lets other threads run meanwhile."""
    in_turn = first_calls.call(("fetch", tensor.device, tensor.dtype))
    with in_turn, tf.device("/job:localhost/replica:0/task:0/device:CPU:0"):
        return tf.identity(tensor).numpy()


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
