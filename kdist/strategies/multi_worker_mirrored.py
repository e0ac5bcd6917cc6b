"""`multi_worker_mirrored`: the devices of several processes or machines, with averaged gradients and no servers.

Over `tf.distribute.MultiWorkerMirroredStrategy`, by a loop of kdist's own: Keras's `fit` fails there. Every worker runs
the program. Worker 0 is the chief: it alone has a session with hooks, and before each call it announces to the others,
by a small all-reduce, what comes next, so that all of them take part. Workers of a `Remote` hear it from the process
with the session instead, which is faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError
from contextlib import suppress
from functools import partial
from typing import ClassVar, SupportsInt, TypeVar

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import number_collectives_when_traced
from kdist.cluster.description import TaskFingerprint, check_fingerprints
from kdist.cluster.network import sockets
from kdist.cluster.network.names import without_proxy
from kdist.cluster.network.port_probe import meet
from kdist.cluster.network.tcp_timeouts import TcpTimeouts
from kdist.cluster.processes.child import kill_after
from kdist.cluster.spec import Membership, Task
from kdist.errors import ClusterError, ConfigError, reason
from kdist.model.names import GLOBAL_STEP
from kdist.strategies.all_reduce import AllReduce, here
from kdist.strategies.base import TrainingSpec
from kdist.threads import in_thread

T = TypeVar("T")

#: Commands of the chief: to run so many steps, to share its values, and to stop, which has 1 if it is interrupted.
_RUN, _SHARE, _STOP = 1, 2, 3
_STOP_SECS = 5.0
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_distributions: dict[Membership, tf.distribute.Strategy] = {}


def join(membership: Membership, start_timeout: float) -> None:
    """Joins the other workers; TensorFlow can do that only before its first op in a process.

    Args:
        start_timeout: seconds within which all must listen at their addresses, and then, within which all must have
            joined; otherwise this process is killed.

    Raises:
        ConfigError: it has run one already.
        ClusterError: a worker did not join within `start_timeout` seconds.
    """
    number_collectives_when_traced()
    if membership in _distributions:
        return
    meet(membership.spec.worker, membership.task.index, start_timeout)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(membership.spec.worker)}),
        task_type="worker",
        task_id=membership.task.index,
        rpc_layer="grpc",
    )
    os.environ.update(without_proxy(membership.spec.addresses.values()))
    try:
        # TensorFlow waits an hour for a worker that was lost since they met, and nothing else runs meanwhile.
        late = f"the other workers did not join within {start_timeout:g} s (cluster.start_timeout)"
        with kill_after(start_timeout, f"{late}; killed, as TensorFlow keeps waiting"):
            _distributions[membership] = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except RuntimeError as error:
        raise ConfigError(
            "multi_worker_mirrored: TensorFlow has run ops in this process already; make the Trainer before "
            f"anything else ({error})"
        ) from error
    sockets.bind_port(membership.spec.port(membership.task))


def check_same(membership: Membership, fingerprint: TaskFingerprint, timeout: float) -> None:
    """Compares the workers, which have joined, with worker 0, the chief; every one of them has to call it.

    Args:
        fingerprint: of this worker.
        timeout: seconds that the others have to call it.

    Raises:
        ConfigError: some differ; all workers say so.
        ClusterError: others do not call it in time, or are lost.
    """
    own, num_workers = membership.task.index, len(membership.spec.worker)

    def exchange() -> list[TaskFingerprint]:
        text = np.frombuffer(fingerprint.to_json().encode(), np.uint8)
        lengths = np.zeros(num_workers, np.int64)
        lengths[own] = len(text)
        lengths = _sum_of_all(membership, lengths)
        texts = np.zeros((num_workers, lengths.max()), np.int64)
        texts[own, : len(text)] = text
        texts = _sum_of_all(membership, texts).astype(np.uint8)
        return [TaskFingerprint.from_json(row[:length].tobytes().decode()) for row, length in zip(texts, lengths)]

    check_fingerprints(_bounded(exchange, timeout, "compare versions and config", "cluster.start_timeout"))


class MultiWorkerMirrored(AllReduce):
    """One replica on each device of each worker.

    Args:
        membership: the worker of this process; it must have joined the others.
        step_timeout: seconds that the other workers may take to respond.
        patience: seconds for which their hosts may be silent.
    """

    name: ClassVar[str] = "multi_worker_mirrored"

    def __init__(self, membership: Membership, *, step_timeout: float, patience: float) -> None:
        self._distribution = _distributions[membership]
        devices = len(self._distribution.extended.worker_devices)
        super().__init__(first_replica=membership.task.index * devices)
        self.batches_per_step = self._distribution.num_replicas_in_sync
        self._membership = membership
        self._announces = membership.is_chief and not membership.started_by_kdist
        # kdist has started the others, too: it waits for them itself, and knows which one was stopped.
        self._step_timeout = None if membership.started_by_kdist and membership.task.index else step_timeout
        self._is_started = False
        self._pids: dict[Task, int] = {}
        spec = membership.spec
        self._tcp_timeouts = TcpTimeouts(spec.worker, [spec.port(membership.task)], patience)

    def start(self, spec: TrainingSpec) -> None:
        self._tcp_timeouts.start()
        self._start(spec, self._distribution)
        # In every worker: collectives are numbered as they are traced.
        if not self._membership.started_by_kdist:
            self._say_together = _traced_sum(self._membership, tf.TensorSpec([2], tf.int64))
        self._bounded(self._share)
        self._pids = self._bounded(self._find_pids)
        self._is_started = True

    @property
    def pids(self) -> Mapping[Task, int]:
        return self._pids

    def run_as_worker(self, spec: TrainingSpec) -> bool:
        """Takes part in what the chief does, until it stops; returns True if the run is at its end, not interrupted.

        Raises:
            ClusterError: the chief, or another worker, is lost.
        """
        try:
            self.start(spec)
            while True:
                # The chief may be busy between two calls: it validates and saves.
                command, argument = self._say(0)
                if command == _STOP:
                    return not argument
                if command == _SHARE:
                    self._share()
                else:
                    super().call(argument)
        except _LOST as error:
            raise _lost(error) from error
        finally:
            self._tcp_timeouts.stop()

    def values_were_set(self, global_step: SupportsInt | None) -> None:
        super().values_were_set(global_step)
        if self._announces:
            self.share()

    def stop(self) -> None:
        if self._announces and self._is_started:
            self._is_started = False
            with suppress(ClusterError):
                self._bounded(lambda: self._say(_STOP, int(self.is_interrupted)), _STOP_SECS)
        self._tcp_timeouts.stop()
        super().stop()

    def call(self, num_steps: int) -> np.ndarray:
        return self._bounded(partial(self._with_all, partial(super().call, num_steps), _RUN, num_steps))

    def share(self) -> None:
        self._bounded(partial(self._with_all, self._share, _SHARE))

    def _with_all(self, function: Callable[[], T], command: int, argument: int = 0) -> T:
        if self._announces:
            self._say(command, argument)
        return function()

    def _say(self, command: int, argument: int = 0) -> tuple[int, int]:
        """Announces a command of the chief, to which other workers contribute 0; returns it."""
        said = self._say_together(tf.constant([command, argument], tf.int64)).numpy()
        return int(said[0]), int(said[1])

    def _find_pids(self) -> dict[Task, int]:
        """The process ids of the other workers on this machine, which each worker tells all others."""
        spec, own = self._membership.spec, self._membership.task
        told = np.zeros(len(spec.worker), np.int64)
        told[own.index] = os.getpid()
        pids = _sum_of_all(self._membership, told)
        hosts = [address.rpartition(":")[0] for address in spec.worker]
        others = (i for i, host in enumerate(hosts) if host == hosts[own.index] and i != own.index)
        return {Task("worker", i): int(pids[i]) for i in others}

    def _share(self) -> None:
        """Sends the chief's values to every worker."""
        values = self._store.values.read()
        content = b"".join(value.tobytes() for value in values.values())
        bits = np.frombuffer(content + bytes(-len(content) % 8), np.int64)
        # The sum of the chief's bits and of zeros.
        own = bits if self._membership.is_chief else np.zeros_like(bits)
        shared = _sum_of_all(self._membership, own).view(np.uint8)
        received, begin = {}, 0
        for name, value in values.items():
            end = begin + value.nbytes
            received[name] = shared[begin:end].copy().view(value.dtype).reshape(value.shape)
            begin = end
        for store in self._stores:
            store.write(received)
        super().values_were_set(received[GLOBAL_STEP])

    def _bounded(self, function: Callable[[], T], timeout: float | None = None) -> T:
        return _bounded(function, timeout or self._step_timeout, "respond", "cluster.step_timeout")


def _bounded(function: Callable[[], T], timeout: float | None, what: str, key: str) -> T:
    """Calls a function that waits for the other workers; after the timeout it is left behind in its thread."""
    try:
        return in_thread(function).result(timeout)
    except TimeoutError:
        raise ClusterError(f"the other workers did not {what} within {timeout:g} s ({key})") from None
    except _LOST as error:
        raise _lost(error) from error


def _sum_of_all(membership: Membership, values: np.ndarray) -> np.ndarray:
    """The sum of what every worker calls it with, of a shape that may be used only once."""
    return _traced_sum(membership, tf.TensorSpec(values.shape, values.dtype))(tf.constant(values)).numpy()


def _traced_sum(membership: Membership, spec: tf.TensorSpec) -> Callable[[tf.Tensor], tf.Tensor]:
    # Not called by its `tf.function`, which would warn of traces: each fit makes some.
    return tf.function(partial(_sum_over_workers, membership), autograph=False).get_concrete_function(spec)


def _sum_over_workers(membership: Membership, values: tf.Tensor) -> tf.Tensor:
    distribution = _distributions[membership]
    first_replica = membership.task.index * len(distribution.extended.worker_devices)

    def replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        # If a worker has several devices, only the first one contributes.
        is_first = int(tf.get_static_value(context.replica_id_in_sync_group)) == first_replica
        return context.all_reduce(tf.distribute.ReduceOp.SUM, here(values if is_first else tf.zeros_like(values)))

    return distribution.experimental_local_results(distribution.run(replica))[0]


def _lost(error: tf.errors.OpError) -> ClusterError:
    return ClusterError(f"a worker is lost, or the chief: {reason(error).splitlines()[0]}")
