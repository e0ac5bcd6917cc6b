"""`multi_worker_mirrored`: the devices of several processes or machines, with averaged gradients and no servers.

Over `tf.distribute.MultiWorkerMirroredStrategy`, by a loop of kdist's own: Keras's `fit` fails there. Every worker runs
the program. Worker 0 is the chief: it alone has a session with hooks, and before each call it announces to the others,
by a small all-reduce, what comes next, so that all of them take part. `kdist.strategies.rounds` says who they are.
Workers of a `Remote` hear it from the process with the session instead, which is faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError
from contextlib import suppress
from functools import partial
from typing import ClassVar, SupportsInt, TypeVar

import numpy as np
import tensorflow as tf

from kdist._compat.collectives import all_reduce
from kdist.cluster.description import TaskFingerprint
from kdist.cluster.spec import Membership, Task
from kdist.config.schema import ClusterConfig
from kdist.data.shares import DealtShares, SharesElsewhere
from kdist.errors import ClusterError, ResizeError, reason
from kdist.log import warn
from kdist.model.names import GLOBAL_STEP
from kdist.strategies.all_reduce import AllReduce, here
from kdist.strategies.base import PendingResize, TrainingSpec
from kdist.strategies.rounds import ChiefsRounds, Round, WorkersRounds, joined
from kdist.threads import in_thread

T = TypeVar("T")

#: Commands of the chief: to run so many steps, to share its values, and to end the round.
_RUN, _SHARE, _END = 1, 2, 3
_STOP_SECS = 5.0
#: Seconds between two looks for lost workers, and for which a call may fail by itself then.
_LOOK_SECS = 1.0
_ABORTED = "Collective ops is aborted by: "
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)


class MultiWorkerMirrored(AllReduce):
    """One replica on each device of each worker.

    Args:
        membership: the worker of this process.
        num_workers: in the cluster.
        config: how long the other workers may take to respond, and how few may be left.
        fingerprint: the properties that workers need alike, if others start them; None compares nothing.
    """

    name: ClassVar[str] = "multi_worker_mirrored"

    def __init__(
        self,
        membership: Membership,
        *,
        num_workers: int,
        config: ClusterConfig,
        fingerprint: TaskFingerprint | None = None,
    ) -> None:
        super().__init__()
        self._membership, self._num_workers = membership, num_workers
        self._rounds: ChiefsRounds | None = None
        if membership.is_chief and not membership.started_by_kdist:
            self._rounds = ChiefsRounds(membership, config, fingerprint)
        # kdist has started the others, too: it waits for them itself, and knows which one was stopped.
        self._step_timeout = None if membership.started_by_kdist and membership.task.index else config.step_timeout
        # As TensorFlow does, it takes the devices of the others to be as many.
        self.num_replicas = self.batches_per_step = num_workers * max(1, len(tf.config.list_logical_devices("GPU")))
        #: Whether other workers wait for what this one announces.
        self._announces = False
        self._pids: dict[Task, int] = {}

    def start(self, spec: TrainingSpec) -> None:
        if self._rounds is None:
            self._train_with(*joined(self._membership), spec)
            self._meet_others()
            return
        self._cluster = self._rounds.launch(spec.log_dir)
        self._cluster.wait()
        self._begin_round(spec)

    def _train_with(self, workers: Mapping[int, str], distribution: tf.distribute.Strategy, spec: TrainingSpec) -> None:
        """Trains with these workers, which have joined each other."""
        self._workers, self._num_workers = workers, len(workers)
        rank = sorted(workers).index(self._membership.task.index)
        self._first_replica = rank * len(distribution.extended.worker_devices)
        self.batches_per_step = distribution.num_replicas_in_sync
        super().stop()
        self._start(spec, distribution)
        # In every worker: collectives are numbered as they are traced.
        self._say_together = self._traced_sum(tf.TensorSpec([2 + 2 * self.num_replicas], tf.int64))

    def _meet_others(self) -> None:
        self._bounded(self._share)
        self._pids = self._bounded(self._find_pids)

    def _begin_round(self, spec: TrainingSpec, values: Mapping[str, np.ndarray] | None = None) -> None:
        """Begins to train with all workers of the cluster, which have reported.

        Args:
            values: to begin with; None for those of the model.

        Raises:
            ClusterError: one of them is lost.
        """
        assert self._rounds is not None
        self._train_with(*self._rounds.begin(spec), spec)
        if values is not None:
            for store in self._stores:
                store.write(values)
            super().values_were_set(values[GLOBAL_STEP])
        self._announces = True
        self._meet_others()

    def _end_round(self, timeout: float | None = None) -> None:
        """Lets the other workers report to the chief again."""
        try:
            self._bounded(lambda: self._say(_END), timeout)
        finally:
            self._announces = False

    @property
    def pids(self) -> Mapping[Task, int]:
        return self._pids

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def can_regroup(self) -> bool:
        return self._rounds is not None and self._cluster is not None

    def regroup(self, interrupted: Callable[[], bool]) -> PendingResize:
        assert self._rounds is not None
        self._announces = False
        self._rounds.break_off()
        return self._rounds.regroup(interrupted)

    def finish_resize(self, resize: PendingResize, spec: TrainingSpec) -> TrainingSpec:
        rounds, cluster, before = self._rounds, self._cluster, self._prepared.spec
        assert rounds is not None
        assert cluster is not None
        if resize.before != resize.after:
            spec = self._with_shares(spec)
        values = self.values.read()
        try:
            if self._announces:
                self._end_round()
                rounds.wait_for(cluster.spec.tasks)
        except ClusterError:
            cluster.dismiss(resize.joining)
            raise
        cluster.admit(resize.joining)
        cluster.dismiss(resize.leaving)
        try:
            self._begin_round(spec, values)
        except ClusterError as error:
            if not resize.joining:
                raise
            # Those that were there before have all values still.
            self._announces = False
            rounds.break_off()
            cluster.dismiss(resize.joining)
            rounds.wait_for(cluster.spec.tasks)
            self._begin_round(before, values)
            raise ResizeError(str(error)) from error
        return spec

    def run_as_worker(self, rounds: WorkersRounds, spec_of: Callable[[Round], TrainingSpec]) -> bool:
        """Takes part in what the chief does, until it has finished, or does without this worker.

        Args:
            spec_of: makes the training of the first round.

        Returns:
            True if there was a round, and this worker has the values of the last one.

        Raises:
            ClusterError: the chief is lost.
            ConfigError: this worker differs from it.
        """
        spec: TrainingSpec | None = None
        while (begun := rounds.next()) is not None:
            spec = spec or spec_of(begun)
            try:
                self._train_with(begun.workers, rounds.join(begun), begun.of(spec))
                self._share()
                self._pids = self._find_pids()
                self._follow_announcements()
            except tf.errors.OpError as error:
                if not _is_loss(error):
                    raise
                warn(f"{self._membership.task}: {_how_lost(error)}; it waits for what the chief does")
        return spec is not None

    def _follow_announcements(self) -> None:
        # The chief may be busy between two calls: it validates and saves.
        data = self._prepared.spec.data
        while True:
            command, argument, *places = self._say(0)
            if command == _END:
                return
            if command == _SHARE:
                self._share()
                continue
            if isinstance(data, SharesElsewhere):
                data.arrived = list(zip(places[::2], places[1::2]))
            super().call(argument)

    def values_were_set(self, global_step: SupportsInt | None) -> None:
        super().values_were_set(global_step)
        if self._announces:
            self.share()

    def stop(self) -> None:
        if self._announces:
            with suppress(ClusterError):
                self._end_round(_STOP_SECS)
        if self._cluster is not None:
            self._cluster.stop(will_resume=self.is_interrupted)
            self._cluster = None
        super().stop()

    def call(self, num_steps: int) -> np.ndarray:
        splits = self._prepared.spec.data.splits
        places = splits.places() if isinstance(splits, DealtShares) else []
        said = [_RUN, num_steps, *(number for place in places for number in place)]
        return self._bounded(partial(self._with_all, partial(super().call, num_steps), *said))

    def share(self) -> None:
        self._bounded(partial(self._with_all, self._share, _SHARE))

    def _with_all(self, function: Callable[[], T], *said: int) -> T:
        if self._announces:
            self._say(*said)
        return function()

    def _say(self, *said: int) -> list[int]:
        """Announces a command of the chief, its argument and places in the data; returns what the chief announces.

        Other workers contribute zeros.
        """
        numbers = np.zeros(2 + 2 * self.num_replicas, np.int64)
        numbers[: len(said)] = said
        return list(map(int, self._say_together(tf.constant(numbers)).numpy()))

    def _find_pids(self) -> dict[Task, int]:
        """The process ids of the other workers on this machine, which each worker tells all others."""
        own = self._membership.task.index
        hosts = {index: address.rpartition(":")[0] for index, address in sorted(self._workers.items())}
        pids = dict(zip(hosts, self._sum_of_all(np.array([os.getpid() if i == own else 0 for i in hosts], np.int64))))
        return {Task("worker", i): int(pids[i]) for i, host in hosts.items() if host == hosts[own] and i != own}

    def _share(self) -> None:
        """Sends the chief's values to every worker."""
        values = self._store.values.read()
        content = b"".join(value.tobytes() for value in values.values())
        bits = np.frombuffer(content + bytes(-len(content) % 8), np.int64)
        # The sum of the chief's bits and of zeros.
        own = bits if self._membership.is_chief else np.zeros_like(bits)
        shared = self._sum_of_all(own).view(np.uint8)
        received, begin = {}, 0
        for name, value in values.items():
            end = begin + value.nbytes
            received[name] = shared[begin:end].copy().view(value.dtype).reshape(value.shape)
            begin = end
        for store in self._stores:
            store.write(received)
        super().values_were_set(received[GLOBAL_STEP])

    def _sum_of_all(self, values: np.ndarray) -> np.ndarray:
        """The sum of what every worker calls it with, of a shape that may be used only once."""
        return self._traced_sum(tf.TensorSpec(values.shape, values.dtype))(tf.constant(values)).numpy()

    def _traced_sum(self, spec: tf.TensorSpec) -> Callable[[tf.Tensor], tf.Tensor]:
        # Not called by its `tf.function`, which would warn of traces: each fit makes some.
        return tf.function(self._sum_over_workers, autograph=False).get_concrete_function(spec)

    def _sum_over_workers(self, values: tf.Tensor) -> tf.Tensor:
        def replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # If a worker has several devices, only the first one contributes.
            is_first = int(tf.get_static_value(context.replica_id_in_sync_group)) == self._first_replica
            return all_reduce(context, tf.distribute.ReduceOp.SUM, here(values if is_first else tf.zeros_like(values)))

        return self._distribution.experimental_local_results(self._distribution.run(replica))[0]

    def _bounded(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Calls a function that waits for the other workers; after the timeout it is left behind in its thread."""
        timeout = timeout or self._step_timeout
        outcome, deadline = in_thread(function), None if timeout is None else time.monotonic() + timeout
        try:
            while True:
                with suppress(TimeoutError):
                    return outcome.result(_LOOK_SECS)
                if self._rounds is not None and self._rounds.lost():
                    # The collective fails by itself, unless the lost one had not begun it.
                    return outcome.result(_LOOK_SECS)
                if deadline is not None and time.monotonic() > deadline:
                    raise ClusterError(f"the other workers did not respond within {timeout:g} s (cluster.step_timeout)")
        except TimeoutError:
            raise ClusterError(self._lost_soon()) from None
        except tf.errors.OpError as error:
            if not _is_loss(error):
                raise
            raise ClusterError(self._lost_soon() or _how_lost(error)) from error

    def _lost_soon(self) -> str:
        return "" if self._rounds is None else self._rounds.lost_soon()


def _is_loss(error: tf.errors.OpError) -> bool:
    """True if an error of TensorFlow's runtime means that a worker is lost, or out of reach."""
    return isinstance(error, _LOST) or _ABORTED in error.message


def _how_lost(error: tf.errors.OpError) -> str:
    # Each worker that passes it on puts that before it.
    why = reason(error).splitlines()[0].replace(_ABORTED, "")
    return f"a worker is lost, or the chief: {why}"
