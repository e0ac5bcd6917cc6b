"""TensorFlow's `ClusterCoordinator`, made to give each worker its own data and never to wait without a bound.

What that takes of TensorFlow's private names is in this file and in `connection`.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops.iterator_ops import IteratorSpec
from tensorflow.python.distribute.coordinator.cluster_coordinator import WorkerPreemptionHandler
from tensorflow.python.eager import context
from tensorflow.python.eager.executor import Executor

from kdist.cluster.connection import ConnectedStrategy, disconnect
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError

T = TypeVar("T")

_STOP_SECS = 2.0
_LIVENESS_CHECK_SECS = 0.5


class Coordinator:
    """Sends calls to whichever worker is free and hands out their results.

    Args:
        spec: addresses of parameter servers and workers, all of which serve already.
        timeout: seconds that a result may take without any other result arriving.
        lost_tasks: says which tasks have ended, and how; asked while waiting.

    Raises:
        tf.errors.UnavailableError: here, when a task does not answer.
        ClusterError: from `result` and `watch`: a parameter server or the last worker is lost, or nothing happened for
            `timeout` seconds.
    """

    def __init__(self, spec: ClusterSpec, *, timeout: float, lost_tasks: Callable[[], dict[Any, str]]) -> None:
        self._spec = spec
        self._timeout = timeout
        self._lost_tasks = lost_tasks
        self._num_workers = len(spec.worker)
        self._told: set[Any] = set()
        self._lanes: dict[int, _Lane] = {}
        self._finished: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        self._cleanup = ExitStack()
        # TensorFlow sets the first two for the whole process and reads the third at every connection.
        for name in (
            "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE",
            "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY",
            "GRPC_FAIL_FAST",
        ):
            self._cleanup.callback(_set_environment, name, os.environ.get(name))
        # All tasks serve already: connecting to one that is gone is an error, and not something to wait for.
        os.environ["GRPC_FAIL_FAST"] = "true"
        # Its logger repeats every error that is raised here anyway.
        self._cleanup.enter_context(_logger_level(tf.get_logger(), logging.CRITICAL))
        # Functions that are garbage already would be looked for on every task, which knows nothing of them.
        gc.collect()
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec.jobs), rpc_layer="grpc"
        )
        try:
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(ConnectedStrategy(resolver))
            os.environ.pop("GRPC_FAIL_FAST")
            self._adapt(self._coordinator._cluster, lost_tasks)
        except BaseException:
            self._cleanup.close()
            raise

    @staticmethod
    def _adapt(cluster: Any, lost_tasks: Callable[[], dict[Any, str]]) -> None:
        """Puts pieces of ours in the place of some that `cluster`, TensorFlow's, has made."""
        cluster.failure_handler.stop()
        cluster.failure_handler = _LostWorkers(cluster, lost_tasks)
        for worker in cluster.workers:
            worker.failure_handler = cluster.failure_handler
            worker.executor = _QuietExecutor()

    def per_worker_iterators(
        self, make_dataset: tf.types.experimental.ConcreteFunction, arguments: Callable[[int], tuple[Any, ...]]
    ) -> Any:
        """One dataset iterator on each worker, made again by TensorFlow when that worker comes back.

        `ClusterCoordinator.create_per_worker_dataset` runs the same function everywhere; here each worker gets its own
        arguments, so that a restarted worker reads its own shard again.

        Args:
            make_dataset: a traced function that returns a dataset.
            arguments: worker index -> arguments of `make_dataset`; they are copied to that worker.

        Returns:
            Per-worker values, an argument for `schedule`; their spec is `iterator_spec(make_dataset)`.
        """
        values = []
        for worker in self._coordinator._cluster.workers:
            worker_arguments = arguments(worker.worker_index)

            def make_iterator(worker_arguments: tuple[Any, ...] = worker_arguments) -> Any:
                return iter(make_dataset(*worker_arguments))

            value = worker.create_resource(make_iterator)
            value._type_spec = iterator_spec(make_dataset)
            values.append(value)
        return tf.distribute.coordinator.PerWorkerValue(tuple(values))

    def iterator_on(
        self, worker_index: int, make_dataset: tf.types.experimental.ConcreteFunction, arguments: tuple[Any, ...]
    ) -> Any:
        """A dataset iterator on one worker, an argument for `start_on`."""
        with tf.device(Task("worker", worker_index).device):
            return iter(make_dataset(*arguments))

    def start_on(self, worker_index: int, function: Callable[..., T], *args: Any) -> None:
        """Calls `function` for one worker and returns at once; `next_finished` has its outcome.

        Calls for one worker follow each other. The function runs in a thread of its own, in the scope of the worker's
        device.
        """
        if worker_index not in self._lanes:
            self._lanes[worker_index] = _Lane(Task("worker", worker_index), self._finished)
        self._lanes[worker_index].calls.put((worker_index, function, args))

    def next_finished(self) -> tuple[int, Future[Any]]:
        """Waits for a call of `start_on`, watching the tasks meanwhile; returns its worker and its outcome.

        Raises:
            ClusterError: see the class.
        """
        found: list[tuple[int, Future[Any]]] = []

        def wait(timeout: float) -> bool:
            with suppress(queue.Empty):
                found.append(self._finished.get(timeout=timeout))
            return bool(found)

        self._wait(wait)
        return found[0]

    def schedule(self, function: tf.types.experimental.ConcreteFunction, *args: Any) -> Any:
        """Queues a call for the next free worker and returns its future result at once."""
        return self._coordinator.schedule(function, args=args)

    def result(self, value: Any) -> Any:
        """Waits for a result of `schedule`, watching the tasks meanwhile.

        Raises:
            ClusterError: see the class.
            tf.errors.OpError: what the call raised.
        """
        self._wait(value._status_available_event.wait)
        return value.fetch()

    def watch(self, function: Callable[[], T]) -> T:
        """Runs what itself waits for tasks, watching them meanwhile; given up, it stays behind in its thread.

        Raises:
            ClusterError: see the class.
        """
        outcome: Future[T] = Future()
        ended = threading.Event()

        def work() -> None:
            try:
                with context.executor_scope(_QuietExecutor()):
                    outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised by `outcome.result`
                outcome.set_exception(error)
            ended.set()

        threading.Thread(target=work, daemon=True).start()
        self._wait(ended.wait)
        return outcome.result()

    def all_answer(self) -> bool:
        """Whether every task that is not lost answers within a few seconds."""
        answered = threading.Event()

        def ask() -> None:
            with context.executor_scope(_QuietExecutor()):
                for job, addresses in self._spec.jobs.items():
                    for index in range(len(addresses)):
                        with suppress(tf.errors.OpError), tf.device(Task(job, index).device):
                            tf.identity(0).numpy()
            answered.set()

        threading.Thread(target=ask, daemon=True).start()
        return answered.wait(_STOP_SECS)

    def _wait(self, is_done: Callable[[float], Any]) -> None:
        """Waits until `is_done(timeout in seconds)` is true."""
        deadline = time.monotonic() + self._timeout
        while not is_done(min(_LIVENESS_CHECK_SECS, self._timeout)):
            self.check_tasks()
            if time.monotonic() > deadline:
                lost = self._lost_tasks()
                suspects = describe_lost(lost) if lost else "every task is alive but may be stopped or out of reach"
                raise ClusterError(f"no task answered for {self._timeout:g} s (cluster.step_timeout); {suspects}")

    def check_tasks(self) -> None:
        """Says once of each lost worker that training goes on without it.

        Raises:
            ClusterError: a parameter server is lost, or no worker is left.
        """
        lost = self._lost_tasks()
        servers = {task: how for task, how in lost.items() if task.job == "ps"}
        if servers:
            raise ClusterError(describe_lost(servers))
        if len(lost) == self._num_workers:
            raise ClusterError("no worker is left: " + describe_lost(lost))
        for task in lost.keys() - self._told:
            self._told.add(task)
            warnings.warn(
                f"kdist: {describe_lost({task: lost[task]})}; training goes on without it and its part of the data",
                stacklevel=2,
            )

    def stop(self) -> None:
        """Ends the coordinator's threads and the connection, waiting a few seconds at most.

        Whatever stood for something on the tasks (variables, functions, iterators) must have been let go before.
        """
        for lane in self._lanes.values():
            lane.calls.put(None)
        self._finished = queue.SimpleQueue()
        # With a dead worker TensorFlow's own stop can block for ever, so it gets a thread that may be left behind.
        stopping = threading.Thread(target=self._coordinator._cluster.stop, daemon=True)
        stopping.start()
        stopping.join(_STOP_SECS)
        gc.collect()
        disconnect()
        self._cleanup.close()


class _Lane:
    """A thread that makes the calls for one worker, one after the other.

    It may be left behind in a call that never returns; it then ends with the process.
    """

    def __init__(self, task: Task, finished: queue.SimpleQueue[tuple[int, Future[Any]]]) -> None:
        self._device = task.device
        self._finished = finished
        self.calls: queue.SimpleQueue[tuple[int, Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        executor = _QuietExecutor()
        while call := self.calls.get():
            worker_index, function, args = call
            outcome: Future[Any] = Future()
            try:
                with tf.device(self._device), context.executor_scope(executor):
                    outcome.set_result(function(*args))
            except BaseException as error:  # noqa: BLE001 - whoever takes the outcome raises it
                outcome.set_exception(error)
            self._finished.put((worker_index, outcome))
            # What the call held on the tasks must not live on in this frame.
            del call, function, args, outcome


class _LostWorkers(WorkerPreemptionHandler):
    """Lets a worker whose call failed rest until every lost task is back.

    TensorFlow's own handler renews the connection at once, which waits for the lost worker inside its runtime without
    a bound; whatever ends the cluster then waits as well.
    """

    def __init__(self, cluster: Any, lost_tasks: Callable[[], dict[Any, str]]) -> None:
        self._lost_tasks = lost_tasks
        self._stopped = threading.Event()
        super().__init__(context.get_server_def(), cluster)

    def stop(self) -> None:
        self._stopped.set()
        super().stop()
        with self._cluster_update_lock:
            self._worker_up_cond.notify_all()

    @contextmanager
    def wait_on_failure(self, on_recovery_fn: Callable[[], None], **callbacks: Any) -> Iterator[None]:
        def recover() -> None:
            # `stop` wakes the threads that rest, too; they find nothing to do then, and end.
            if not self._stopped.is_set():
                on_recovery_fn()

        if self._stopped.is_set():
            yield
        else:
            with super().wait_on_failure(on_recovery_fn=recover, **callbacks):
                yield

    def _preemption_handler(self) -> None:
        while self._cluster_due_for_update_or_finish.wait():
            # A process that was killed is known to be lost a moment after its connections end.
            if self._stopped.wait(_LIVENESS_CHECK_SECS):
                return
            if self._lost_tasks():
                continue
            with self._cluster_update_lock:
                try:
                    context.context().update_server_def(self._server_def)
                except tf.errors.OpError as error:
                    self._error_from_recovery = error
                self._cluster_due_for_update_or_finish.clear()
                self._worker_up_cond.notify_all()


class _QuietExecutor(Executor):
    """Runs what may fail with a task.

    An executor keeps the last error of its ops. TensorFlow's own one, which the whole process shares, would fail with
    it later; one of its coordinator's would print it when Python collects it.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(pywrap_tfe.TFE_NewExecutor(False, True, 0))

    def wait(self) -> None:
        try:
            super().wait()
        except tf.errors.OpError:
            self.clear_error()


def iterator_spec(make_dataset: tf.types.experimental.ConcreteFunction) -> IteratorSpec:
    """The type spec of iterators over the dataset that `make_dataset` returns."""
    return IteratorSpec(make_dataset.structured_outputs.element_spec)


def lost_soon(lost_tasks: Callable[[], dict[Any, str]]) -> dict[Any, str]:
    """The lost tasks; with none, those after a moment: a process that was killed ends after its connections."""
    if lost := lost_tasks():
        return lost
    threading.Event().wait(_LIVENESS_CHECK_SECS)
    return lost_tasks()


def describe_lost(lost: dict[Any, str]) -> str:
    """`worker:1 is lost (killed by signal 9, SIGKILL)`, joined over the tasks."""
    return ", ".join(f"{task} is lost ({how})" for task, how in lost.items())


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _logger_level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
