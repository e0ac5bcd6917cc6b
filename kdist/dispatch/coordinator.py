"""The chief's side of a cluster: sends calls to workers, and never waits for them without a limit.

Replaces TensorFlow's `ClusterCoordinator`, which hangs when a task is stopped, when all workers are lost and while a
lost worker is away. As there, calls run on workers by TensorFlow's remote execution; which worker gets a call, and what
happens to the calls of a lost worker, is decided here.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from kdist._compat.first_call_lock import call_in_turn, first_calls
from kdist._compat.tensorflow import QuietExecutor, executor_scope, remove_unused_functions, unused_functions
from kdist.cluster.spec import Task
from kdist.dispatch.call_queue import Call, Calls, Disabled
from kdist.dispatch.connection import compute_device, connect, disconnect, reconnect
from kdist.dispatch.health import Supervisor, ask, describe_lost
from kdist.errors import ClusterError
from kdist.log import warn
from kdist.threads import in_thread

T = TypeVar("T")

_CHECK_SECS = 0.5
_ANSWER_SECS = 10.0
_ABANDON_SECS = 2.0
_TRIES = 3
#: Functions that nothing uses, and that tasks keep until a new one is traced. Validation makes some each time.
_UNUSED_FUNCTIONS = 100

#: TensorFlow's errors when a task is lost, when another one has its address, and when it dropped a call of a lost one.
OUT_OF_REACH = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
# Parts of the messages of errors that may have other causes: a new process at an old address does not know what the old
# one knew, and a task that was removed no longer has a client.
_OF_A_LOST_PROCESS = ("remote_handle", "unknown device", "context_id", "Unable to find a context", "Client for target")


class CallsCancelled(Exception):
    """Calls in flight took too long after an interruption and were discarded."""


@dataclass(frozen=True)
class Finished:
    """A finished call, without its function: handles to objects on the tasks must not survive in an error."""

    worker: int
    tag: Any
    outcome: Future[Any]

    @property
    def is_lost(self) -> bool:
        """True if it failed because its worker is lost."""
        return may_be_lost(self.outcome.exception())


class Coordinator:
    """Sends calls to workers and hands out their results.

    A call is a Python function of the worker's index. It runs in the worker's own thread, in the scope of its device,
    and calls TensorFlow functions.

    Args:
        supervisor: knows which tasks serve; consulted while waiting.
        timeout: seconds without any result before unresponsive tasks are looked for.
        grace_secs: seconds that calls in flight have to finish after an interruption.
        on_return: called with the index of a worker that has returned: a new process that holds only the functions that
            were traced.
        on_loss: called with the index of a worker that is lost.

    Attributes:
        calls: that wait for workers.
        interrupted: returns whether training is to end.
        num_lost: how often a worker was lost.

    Raises:
        tf.errors.UnavailableError: on creation, when a task does not respond.
        ClusterError: from every method that waits: a parameter server or the last worker is lost, or nothing happened
            for `timeout` seconds.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        timeout: float,
        grace_secs: float,
        on_return: Callable[[int], None],
        on_loss: Callable[[int], None],
    ) -> None:
        self._supervisor = supervisor
        self._cluster = cluster = supervisor.cluster
        self._timeout = timeout
        self._grace_secs = grace_secs
        self._interrupted_at: float | None = None
        self._has_cancelled = False
        self.interrupted: Callable[[], bool] = lambda: False
        self.num_lost = 0
        self._on_return, self._on_loss = on_return, on_loss
        self._finished: queue.SimpleQueue[tuple[Call, Finished]] = queue.SimpleQueue()
        self.calls = Calls(self._workers)
        #: Connected workers whose calls failed because their hosts do not respond; they get no calls until they do.
        self._away: set[int] = set()
        #: Failures of a connected worker since its last result.
        self._failures: Counter[int] = Counter()
        self._last_check = time.monotonic()
        # Functions that are already garbage would be looked up on every task, which does not know them.
        gc.collect()
        first_calls.forget()
        connect(self._spec, cluster.chief_address, any_port=cluster.any_chief_port)
        for worker in self._workers:
            self._start_thread(worker)

    @property
    def _spec(self) -> tf.train.ClusterSpec:
        return tf.train.ClusterSpec(self._cluster.spec.jobs)

    @property
    def _workers(self) -> list[int]:
        return [task.index for task in self._cluster.spec.of_job("worker")]

    def _start_thread(self, worker: int) -> None:
        # Left behind in a call that never returns, it ends with the process.
        work = partial(_work, worker, self.calls, self._finished)
        threading.Thread(target=work, daemon=True, name=f"kdist-worker-{worker}").start()

    def connect_joined(self, joined: Collection[Task]) -> None:
        """Connects tasks that serve and have joined the cluster; workers among them get calls from now on.

        Functions that were traced before are sent to them.

        Raises:
            tf.errors.OpError: one is lost again; then nothing changed, and the cluster has to dismiss it.
        """
        workers = [task.index for task in joined if task.job == "worker"]
        with first_calls.call(None):
            self.before_tracing()
            self._insist_on(partial(self._reconnect, and_with=workers), but=joined)
        for worker in workers:
            self.calls.admit(worker)
            self._start_thread(worker)

    def have_finished(self, workers: Collection[int]) -> bool:
        """Gives workers no more calls; true if they run none."""
        for worker in workers:
            self.calls.disable(worker, Disabled.LEAVES)
        return not any(map(self.calls.is_calling, workers))

    def disconnect(self, leaving: Collection[Task]) -> None:
        """Closes the connections with tasks; no handle to an object on them may be left, and workers run no calls."""
        for task in leaving:
            if task.job == "worker":
                self.calls.remove(task.index)
                self.calls.drop(task.index)
                self._failures.pop(task.index, None)
                self._away.discard(task.index)
        gc.collect()
        self._insist_on(partial(self._reconnect, without=leaving))
        self._supervisor.forget(leaving)

    def _insist_on(self, connect: Callable[[], None], but: Collection[Task] = ()) -> None:
        """Connects, if a worker is lost at that moment without it, unless it is one of `but`."""
        for number in range(_TRIES):
            try:
                connect()
                return
            except OUT_OF_REACH:
                if number == _TRIES - 1 or self._supervisor.lost_soon().keys() & {*but}:
                    raise
                self.check_tasks()

    def submit(self, function: Callable[[int], Any], tag: Any = None) -> None:
        """Calls `function` for the next free worker, and again for another one if that worker is lost."""
        self.calls.put(Call(function, tag, is_shared=True))

    def start_on(self, worker: int, function: Callable[[int], Any], tag: Any = None) -> None:
        """Calls `function` for one worker; calls for the same worker run one after the other."""
        self.calls.put(Call(function, tag, is_shared=False), worker)

    def next_finished(self) -> Finished:
        """Waits for a call to finish, and watches the tasks in the meantime.

        A call of `submit` whose worker is lost runs elsewhere; one of `start_on` is returned, and `is_lost`.
        """
        while True:
            call, finished = self._wait(self._next_in, is_call=True)
            error = finished.outcome.exception()
            if not may_be_lost(error):
                self._failures[finished.worker] = 0
                return finished
            self._has_failed(finished.worker, error)
            if not call.is_shared:
                return finished
            self.calls.put(call, first=True)

    def _next_in(self, timeout: float) -> tuple[Call, Finished] | None:
        with suppress(queue.Empty):
            return self._finished.get(timeout=timeout)
        return None

    def watch(self, function: Callable[[], T], kind: Hashable = None, *, is_call: bool = False) -> T:
        """Runs a function that waits for tasks, and watches them in the meantime; see `start`.

        Only a call of workers (`is_call`) is cancelled if it takes too long after an interruption: a save may take all
        of the time that is left.
        """
        return self.wait_for(self.start(function, kind), is_call=is_call)

    def start(self, function: Callable[[], T], kind: Hashable = None) -> Future[T]:
        """Runs a function that waits for tasks in a thread, where a failure leaves it; `kind` as in `FirstCalls`."""
        return in_thread(partial(call_in_turn, function, kind))

    def wait_for(self, outcome: Future[T], *, is_call: bool = False) -> T:
        """Waits for what was started, and watches the tasks in the meantime."""
        self._wait(lambda timeout: wait([outcome], timeout).done, is_call=is_call)
        return outcome.result()

    def before_tracing(self) -> None:
        """Makes sure that every connected task responds: a new function is sent to all of them.

        Unused functions are removed from them.

        TensorFlow waits for a stopped task without a limit, and nothing else of this process runs in the meantime.

        Raises:
            ClusterError: a task does not respond, and this process may not replace it.
        """
        while True:
            self.wait_for_silent()
            silent, _ = self._ask()
            if not silent:
                remove_unused_functions()
                return
            self._replace(silent, f"did not respond within {_ANSWER_SECS:g} s")
            self.check_tasks()

    def wait_for_silent(self, job: str | None = None) -> None:
        """Waits while connected tasks (of one job, if given) are silent: each returns, or counts as lost.

        A run that is ending waits for no worker.
        """
        while silent := {t for t in self._cluster.silent_tasks() if job in (None, t.job)} & self._connected():
            if self.interrupted() and (workers := [task.index for task in silent if task.job == "worker"]):
                for worker in workers:
                    self._remove(worker)
                continue
            time.sleep(_CHECK_SECS)
            self.check_tasks()

    def all_answer(self) -> bool:
        """Returns true if every connected task responds within a few seconds, even if only as another process."""
        return not self._connected() & self._cluster.silent_tasks() and not self._ask(_ABANDON_SECS)[0]

    def examine(self) -> None:
        """Finds out which tasks are lost after a failure, and removes lost workers.

        Raises:
            ClusterError: a parameter server is lost, or the last worker.
        """
        # Nothing can be done without servers, so they are waited for; workers are not.
        self.wait_for_silent("ps")
        _, broken = self._ask()
        if servers := [task for task in broken if task.job == "ps"]:
            lost = {task: how for task, how in self._supervisor.lost_soon().items() if task in servers}
            gone = dict.fromkeys(servers, "was replaced by another process")
            raise ClusterError(describe_lost(lost or gone))
        for task in broken:
            self._remove(task.index)
        self.check_tasks()

    def check_tasks(self) -> None:
        """Removes workers that are lost, and connects those that have returned.

        Raises:
            ClusterError: a parameter server is lost, or no worker is left.
        """
        self._last_check = time.monotonic()
        if self._has_cancelled:
            return
        serving = {*self._supervisor.check()}
        for worker in self._workers:
            if worker not in serving and worker in self.calls.connected:
                self._remove(worker)
        silent = {task.index for task in self._cluster.silent_tasks() if task.job == "worker"}
        for worker in serving - silent:
            if worker not in self.calls.connected:
                self._admit(worker)
            elif worker in self._away:
                # If it is another process by now, its next call shows it.
                self._away.discard(worker)
                self.calls.enable(worker, Disabled.FAILED)
        if len(unused_functions) > _UNUSED_FUNCTIONS and self.all_answer():
            remove_unused_functions()

    def wait_a_moment(self, at_most: float) -> None:
        """Gives workers a moment, at most so many seconds, to return; `CallsCancelled` if training is to end."""
        if self.interrupted():
            raise CallsCancelled
        time.sleep(min(_CHECK_SECS, at_most))
        self.check_tasks()

    def stop(self) -> None:
        """Ends the threads and the connection; handles to objects on the tasks must have been deleted before."""
        self.calls.stop()
        self._finished = queue.SimpleQueue()
        gc.collect()
        disconnect()

    def _wait(self, poll: Callable[[float], T | None], *, is_call: bool) -> T:
        """Calls `poll(timeout in seconds)` until it returns something true; returns that."""
        started, tries = time.monotonic(), 0
        while not (found := poll(min(_CHECK_SECS, self._timeout))):
            if is_call:
                self._cancel_when_overdue()
            self.check_tasks()
            if time.monotonic() - started > self._timeout:
                # A task that responds may run a long step, or prepare its first one.
                tries = 0 if self._replace_silent() else tries + 1
                if tries == _TRIES:
                    lost = ", ".join(str(Task("worker", w)) for w in self._workers if w not in self.calls.connected)
                    late = f"no result for {_TRIES} x {self._timeout:g} s (cluster.step_timeout)"
                    every = f"{lost} lost; every other task" if lost else "every task"
                    raise ClusterError(f"{late}: {every} responds")
                started = time.monotonic()
        # If results arrive all the time, nothing waits here; tasks are watched all the same.
        if time.monotonic() - self._last_check > _CHECK_SECS:
            self.check_tasks()
            if self.calls.longest_secs() > self._timeout:
                self._replace_silent()
        return found

    def _cancel_when_overdue(self) -> None:
        """Raises `CallsCancelled` once, `grace_secs` after an interruption, and kills the workers of this process."""
        if not self.interrupted() or self._has_cancelled:
            return
        self._interrupted_at = self._interrupted_at or time.monotonic()
        if time.monotonic() - self._interrupted_at > self._grace_secs:
            self._has_cancelled = True
            # Their calls must not continue while the parameters are read.
            self._cluster.kill([Task("worker", worker) for worker in self._workers])
            self.calls.clear()
            self._finished = queue.SimpleQueue()
            raise CallsCancelled

    def _replace_silent(self) -> bool:
        """Replaces the tasks that do not respond; False if all do.

        Raises:
            ClusterError: this process may not replace them.
        """
        silent, _ = self._ask()
        if silent:
            self._replace(silent, f"did not respond for {self._timeout:g} s (cluster.step_timeout)")
        self.calls.forget_time()
        return bool(silent)

    def _replace(self, silent: Collection[Task], what: str) -> None:
        """Kills unresponsive tasks, except those whose hosts do not respond: they return, or count as lost.

        Raises:
            ClusterError: this process may not kill them.
        """
        silent = set(silent) - self._cluster.silent_tasks()
        if not silent:
            return
        names = ", ".join(map(str, sorted(silent, key=str)))
        if not self._cluster.kill(silent):
            if self.interrupted() and all(task.job == "worker" for task in silent):
                for task in silent:
                    self._remove(task.index)
                return
            raise ClusterError(f"{names} {what}; stopped or out of reach")
        warn(f"{names} {what}; killing {'it' if len(silent) == 1 else 'them'}")

    def _ask(self, timeout: float = _ANSWER_SECS) -> tuple[set[Task], set[Task]]:
        """Asks every connected task for a sign of life, except those that are silent; see `ask`."""
        return ask(self._connected() - self._cluster.silent_tasks(), timeout)

    def _connected(self) -> set[Task]:
        return {*self._cluster.spec.of_job("ps")} | {Task("worker", worker) for worker in self.calls.connected}

    def _has_failed(self, worker: int, error: BaseException | None) -> None:
        """Removes a worker whose call failed, if it is lost; otherwise lets it try again.

        Raises:
            ClusterError: see the class.
            tf.errors.OpError: the worker is connected, and its calls fail repeatedly.
        """
        self.examine()
        if worker in self.calls.connected:
            if Task("worker", worker) in self._cluster.silent_tasks():
                self._away.add(worker)
                return
            self._failures[worker] += 1
            if self._failures[worker] > _TRIES and error is not None:
                raise error
            self.calls.enable(worker, Disabled.FAILED)

    def _remove(self, worker: int) -> None:
        self.num_lost += 1
        self._away.discard(worker)
        for call in self.calls.remove(worker):
            outcome: Future[Any] = Future()
            outcome.set_exception(tf.errors.UnavailableError(None, None, f"{Task('worker', worker)} is lost"))
            self._finished.put((call, Finished(worker, call.tag, outcome)))
        # Its calls in flight fail now, and run on other workers.
        self._cluster.disconnect(Task("worker", worker))
        with suppress(*OUT_OF_REACH):
            self._reconnect()
        self._on_loss(worker)

    def _admit(self, worker: int) -> None:
        """Connects a worker that serves again; if that fails, the next check tries again."""
        # Asked last: a task that is stopped between the question and the connection would block this process.
        with first_calls.call(None):
            if not self.all_answer():
                return
            self._cluster.reconnect(Task("worker", worker))
            try:
                self._reconnect(and_with=[worker])
            except OUT_OF_REACH:
                return
        self._on_return(worker)
        self.calls.admit(worker)

    def _reconnect(self, and_with: Collection[int] = (), without: Collection[Task] = ()) -> None:
        connected = {*self.calls.connected, *and_with}
        away = [Task("worker", worker) for worker in self._workers if worker not in connected]
        with first_calls.call(None):
            reconnect(self._spec, {*self._cluster.spec.left, *away, *without})
            first_calls.forget()


def _work(worker: int, calls: Calls, finished: queue.SimpleQueue[tuple[Call, Finished]]) -> None:
    """Makes the calls for one worker, one after the other."""
    executor = QuietExecutor()
    device = compute_device(Task("worker", worker))
    while call := calls.take(worker):
        outcome: Future[Any] = Future()
        try:
            with tf.device(device), executor_scope(executor):
                outcome.set_result(call.function(worker))
        except BaseException as error:  # noqa: BLE001 - whoever takes the outcome raises it
            if may_be_lost(error):
                calls.disable(worker, Disabled.FAILED)
            outcome.set_exception(error)
        finished.put((call, Finished(worker, call.tag, outcome)))
        # Handles to objects on the tasks must not survive in this frame.
        del call, outcome


def may_be_lost(error: BaseException | None) -> bool:
    """Returns true if an error of a call may mean that its worker is lost, or was replaced by another process."""
    if isinstance(error, OUT_OF_REACH):
        return True
    return isinstance(error, tf.errors.OpError) and any(sign in error.message for sign in _OF_A_LOST_PROCESS)
