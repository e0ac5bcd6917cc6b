"""`Remote`: an all-reduce strategy whose replicas run in processes of their own on this machine.

TensorFlow can join other workers, and split the CPU into devices, only before its first op in a process. So kdist
starts processes for the replicas, and this one, which has the session, calls worker 0 over a pipe, and tells the other
workers to take part. `kdist.strategies.remote_main` is the other end. Data that may end is read here, and its batches
are sent with each call.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import tensorflow as tf

from kdist import forks
from kdist._compat import op_libraries
from kdist.cluster.local import log_path, share_of_machine
from kdist.cluster.network.sockets import bound_to, held_ports
from kdist.cluster.processes.child import Child, end_children, task_environment
from kdist.cluster.processes.forkserver import TaskProgram, fork_server, start_task
from kdist.cluster.processes.watchdog import stopped_longer_than
from kdist.cluster.spec import ClusterChange, ClusterShape, ClusterSpec, Task
from kdist.config.schema import ClusterConfig
from kdist.data.base import DataContext, TrainingData
from kdist.data.pickling import dumps, loads, pack_program
from kdist.data.shares import DealtShares, SharedData
from kdist.errors import ClusterError, ConfigError, KdistError, ResizeError, reason
from kdist.model.names import GLOBAL_STEP, LEARNING_RATE
from kdist.model.state import read_from_model
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.strategies.all_reduce import AllReduce
from kdist.strategies.base import PendingResize, Strategy, TrainingSpec, Values
from kdist.threads import in_thread

_POLL_SECS = 0.1
_STOP_SECS = 5.0
#: The kernel tells of a process that was killed a little later than of its connections.
_KILLED_SECS = 1.0


#: The number of replicas, and the shapes and names by rows of the values.
Facts: TypeAlias = tuple[int, Mapping[str, tuple[int, ...]], frozenset[str]]


class BatchesElsewhere(TrainingData):
    """Data whose splits another process has, which sends the arguments of each batch.

    Attributes:
        arrived: these arguments, by replica.
        state_there: what was read of the data, when the other process saves.
    """

    def __init__(self, data: TrainingData) -> None:
        self._data = data
        self.arrived: Sequence[Sequence[Any]] = ()
        self.state_there: str | None = None

    def state(self) -> str | None:
        return self.state_there

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return self._data.specs(num_workers)

    def trace_transfer(self, num_workers: int) -> None:
        self._data.trace_transfer(num_workers)

    def arguments(self, worker_index: int, num_workers: int) -> list[Any]:
        return [tf.constant(argument) for argument in self.arrived[worker_index]]

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> Any:
        return self._data.batches(context, *arguments)


class Remote(AllReduce):
    """A strategy in processes of its own.

    Args:
        make: membership -> the strategy, not started; called in the processes.
        num_devices: of each process, as far as it is known.
        num_cpus: logical CPU devices to create in each process; 0 for the devices that exist.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Any], Strategy],
        shape: ClusterShape,
        cluster: ClusterConfig,
        *,
        num_devices: int = 1,
        num_cpus: int = 0,
    ) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self._make = make
        self._num_cpus, self._num_devices, self._config = num_cpus, num_devices, cluster
        self._take_number(max(1, shape.num_workers))
        self._processes = self._processes_for(self._num_workers)
        #: The processes that are to take the place of the present ones, and when they have started.
        self._following: tuple[Processes, Future[Any]] | None = None

    def _take_number(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.num_replicas = self.batches_per_step = num_workers * self._num_devices

    def _processes_for(self, num_workers: int) -> Processes:
        join = self.name == "multi_worker_mirrored"
        return Processes(num_workers, self._num_cpus, self._config, join=join)

    def start(self, spec: TrainingSpec) -> None:
        # Finds what is wrong with the model and the data before anything starts.
        self._prepared = self._prepare(spec)
        self._train_on(self._processes, self._processes.start(self._request(spec), spec.log_dir), spec)

    def _train_on(self, processes: Processes, facts: Facts, spec: TrainingSpec) -> None:
        """Trains on processes that have started, see `Processes.start`."""
        self._processes = processes
        num_replicas, shapes, by_rows = facts
        if num_replicas != self._prepared.num_workers:
            self.num_replicas = self.batches_per_step = num_replicas
            self._prepared = self._prepare(spec)
        self._copied = [(variable, variable.numpy()) for variable in self._prepared.replica_step.outside]
        self._processes.call_all("share")
        self.values = RemoteValues(self, self._processes, spec.data, shapes, by_rows)

    def _request(self, spec: TrainingSpec) -> bytes:
        """The training for `remote_main`: the maker of its strategy, a source of the model, the spec, the values."""
        data = spec.data
        if data.splits is not None:
            data = data.elsewhere() if isinstance(data, SharedData) else BatchesElsewhere(data)
        sent = replace(spec, model=cast(Any, None), source=None, data=data, stays_on_servers=bool)
        return pack_program((self._make, spec.source or spec.model, sent, read_from_model(spec.model)))

    def call(self, num_steps: int) -> np.ndarray:
        self._check_copied()
        return self._processes.call_all("run", num_steps, self._told_of_data())

    @property
    def _replicas(self) -> range:
        return range(self.num_replicas)

    def _told_of_data(self) -> Sequence[Any] | None:
        """The batches, as the replicas are told of them: arguments, or their places; None if they know."""
        data, number = self._prepared.spec.data, self.num_replicas
        if isinstance(data.splits, DealtShares):
            return data.splits.places()
        if data.splits is None:
            return None
        return [[np.asarray(a) for a in data.arguments(replica, number)] for replica in self._replicas]

    def _check_copied(self) -> None:
        for variable, value in self._copied:
            if not np.array_equal(variable.numpy(), value):
                raise ConfigError(
                    f"callbacks: {variable.name} is a tf.Variable that the step reads, and a callback or hook has "
                    f"assigned it; with strategy={self.name} the processes that train have copies of their own: make "
                    "it a keras.Variable, whose values travel"
                )

    @property
    def pids(self) -> Mapping[Task, int]:
        return self._processes.pids

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def begin_resize(self, change: ClusterChange) -> PendingResize:
        """Starts as many processes as there are to be: TensorFlow's collectives are of a fixed number of workers."""
        if self.name != "multi_worker_mirrored":
            return super().begin_resize(change)
        spec = ClusterSpec((), ("",) * self._num_workers)
        before, after = spec.shape, change.applied_to(spec)
        if before != after:
            # Where they are to read, they are told with each call.
            processes, training = self._processes_for(after.num_workers), self._with_shares(self._prepared.spec)
            start = partial(processes.start, self._request(training), training.log_dir)
            self._following = processes, in_thread(start)
        return PendingResize(before, after)

    def may_finish(self, resize: PendingResize) -> bool:
        if self._following is None or not self._following[1].done():
            return self._following is None
        self._following[1].result()
        return True

    def cancel_resize(self, resize: PendingResize) -> None:
        if self._following is not None:
            self._following[0].stop()
            self._following = None

    def finish_resize(self, resize: PendingResize, spec: TrainingSpec) -> TrainingSpec:
        assert self._following is not None
        (processes, started), self._following = self._following, None
        before, values, spec = self._processes, self.values, self._with_shares(spec)
        with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
            prefix = Path(folder) / "values"
            try:
                values.wait_for(values.begin_save(prefix, aside=False))
            except (OSError, KdistError, tf.errors.OpError) as error:
                processes.stop()
                raise error if isinstance(error, ClusterError) else ResizeError(reason(error)) from error
            learning_rate = values.read({LEARNING_RATE} & values.shapes.keys())
            self._take_number(resize.after.num_workers)
            self._train_on(processes, started.result(), spec)
            processes.call_all("begin_data_at", spec.count, spec.epoch_lengths)
            self.values.restore(prefix)
        if learning_rate:
            self.values.write(learning_rate)
        before.stop()
        return spec

    def stop(self) -> None:
        self.cancel_resize(PendingResize(ClusterShape(), ClusterShape()))
        self._processes.stop()


class Processes:
    """The worker processes of a `Remote`, of which each makes `num_cpus` logical devices if that is not 0."""

    def __init__(self, number: int, num_cpus: int, cluster: ClusterConfig, *, join: bool) -> None:
        self._number, self._num_cpus, self._cluster, self._join = number, num_cpus, cluster, join
        self._children: list[Child] = []
        self._pipes: list[Connection] = []
        self._at_end = ExitStack()
        self._stopped_since: dict[int, float] = {}
        self._lock = threading.Lock()

    @property
    def pids(self) -> Mapping[Task, int]:
        return {Task("worker", i): child.pid for i, child in enumerate(self._children)}

    def start(self, request: bytes, log_dir: Path) -> Facts:
        """Starts them with the training, see `Remote`, and waits until their strategy has started.

        Returns:
            The number of replicas of all workers together, and the shapes and names by rows of the values.

        Raises:
            ClusterError: one is lost, or has not started within `cluster.start_timeout` seconds.
            KdistError: the model or the data failed in one of them.
        """
        with tempfile.TemporaryDirectory(prefix="kdist-") as folder:
            file = Path(folder) / "request"
            try:
                file.write_bytes(request)
            except OSError as error:
                why = f"the training cannot be written there for the workers: {error.strerror or error}"
                raise ClusterError(f"{folder}: {why}") from error
            self._launch(file, [log_path(log_dir, Task("worker", i)) for i in range(self._number)])
            facts: Facts = self._result()
        for child in self._children:
            child.has_started()
        return facts

    def _launch(self, request: Path, logs: Sequence[Path]) -> None:
        ports = self._at_end.enter_context(held_ports(self._number if self._join else 0))
        shape = ClusterShape(0, self._number)
        server = self._at_end.enter_context(fork_server(logs[0], train=True))
        self._at_end.callback(lambda: end_children(self._children, _STOP_SECS))
        for index, log in enumerate(logs):
            here, there = Pipe()
            limit_waits(here, self._cluster.step_timeout)
            with there:
                self._pipes.append(self._at_end.enter_context(here))
                forks.keep_from_children(here)
                intra_op, inter_op, cores = share_of_machine(Task("worker", index), shape)
                # What a process needs before it may import TensorFlow.
                options = {
                    "index": index,
                    # That of `mirrored` joins no others, and has no address.
                    "workers": [f"127.0.0.1:{port}" for port in ports],
                    "num_cpus": self._num_cpus,
                    "intra_op_threads": intra_op,
                    "inter_op_threads": inter_op,
                    "request": str(request),
                    "path": sys.path,
                    "pipe": there.fileno(),
                    "bind": bound_to(),
                    "start_timeout": self._cluster.start_timeout,
                    # One process with several devices uses all of them.
                    "cores": cores if self._number > 1 else None,
                    "op_libraries": op_libraries.loaded_by(),
                }
                program = TaskProgram(
                    "kdist.strategies.remote_main",
                    json.dumps(options),
                    task_environment(Task("worker", index), self._cluster.devices),
                    log,
                    prints_to_log=True,
                    pass_fds=[there.fileno()],
                )
                self._children.append(start_task(server, program, self._cluster.start_timeout))

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of `remote_main` in worker 0; returns its result, or raises what it has raised.

        Raises:
            ClusterError: a worker is lost.
        """
        return self._call(self._pipes[:1], name, arguments)

    def call_all(self, name: str, *arguments: Any) -> Any:
        """As `call`, for a function in which all workers take part."""
        return self._call(self._pipes, name, arguments)

    def _call(self, pipes: Sequence[Connection], name: str, arguments: Sequence[Any]) -> Any:
        message = dumps((name, arguments))
        with self._lock:
            for index, pipe in enumerate(pipes):
                # It is closed if the worker has ended, which `_result` finds.
                with suppress(BrokenPipeError, ConnectionResetError):
                    try:
                        pipe.send_bytes(message)
                    except BlockingIOError:
                        raise self._silent(index, "took nothing of a message") from None
            return self._result()

    def _result(self) -> Any:
        try:
            while not self._pipes[0].poll(_POLL_SECS):
                self._check()
            is_error, content = loads(self._pipes[0].recv_bytes())
        except BlockingIOError:
            raise self._silent(0, "sent nothing of a message") from None
        except (EOFError, OSError):
            is_error, content = True, ClusterError("worker:0 has closed its pipe")
        if is_error and isinstance(content, ClusterError):
            # Worker 0 knows less about a worker that was killed than this process, which sees how it ended.
            deadline = time.monotonic() + _KILLED_SECS
            while time.monotonic() < deadline:
                self._check()
                time.sleep(_POLL_SECS)
        if is_error:
            raise content
        return content

    def _check(self) -> None:
        """Raises why a worker cannot go on, if one cannot."""
        codes = [(child.poll(), index) for index, child in enumerate(self._children)]
        if ended := [(code, index) for code, index in codes if code is not None]:
            # One that was killed comes first, then those that failed: the others have ended because of it.
            _, index = min(ended, key=lambda each: (each[0] == 0, each))
            child = self._children[index]
            raise self._left(index) or ClusterError(
                f"{Task('worker', index)} died ({child.how_it_ended()}){child.log_tail()}"
            )
        if self._children[0].is_late:
            raise ClusterError(
                f"the workers did not respond within {self._cluster.start_timeout:g} s (cluster.start_timeout)"
                + self._children[0].log_tail()
            )
        pids = [child.pid for child in self._children]
        for pid in stopped_longer_than(self._cluster.step_timeout, pids, self._stopped_since):
            raise ClusterError(
                f"{Task('worker', pids.index(pid))} has been stopped for {self._cluster.step_timeout:g} s "
                "(cluster.step_timeout)"
            )

    def _silent(self, index: int, how: str) -> ClusterError:
        secs = self._cluster.step_timeout
        return ClusterError(f"{Task('worker', index)} {how} for {secs:g} s (cluster.step_timeout)")

    def _left(self, index: int) -> BaseException | None:
        """The error that a worker has sent before it ended; None if it has sent none."""
        with suppress(EOFError, OSError):
            while self._pipes[index].poll():
                is_error, content = loads(self._pipes[index].recv_bytes())
                if is_error:
                    return cast(BaseException, content)
        return None

    def stop(self) -> None:
        """Ends them; may be called repeatedly."""
        self._at_end.close()
        self._children, self._pipes = [], []


def limit_waits(connection: Connection, secs: float) -> None:
    """Lets a message through a pipe fail if the other process, in the middle of it, is silent for so many seconds."""
    whole = int(secs)
    limit = struct.pack("ll", whole, int((secs - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, option, limit)


class RemoteValues(Values):
    """The values of a strategy in other processes; `data` is read here, if it may end."""

    def __init__(
        self,
        strategy: Remote,
        processes: Processes,
        data: TrainingData,
        shapes: Mapping[str, tuple[int, ...]],
        by_rows: frozenset[str],
    ) -> None:
        self._strategy, self._data = strategy, data
        self._call, self._call_all = processes.call, processes.call_all
        self.shapes, self.by_rows = shapes, by_rows

    def global_step(self) -> int:
        return int(self._call("of_values", "global_step"))

    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        portion = self._call("first_portion", names)
        while portion is not None:
            yield portion
            portion = self._call("next_portion")

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        self._call("of_values", "write", dict(values))
        self._call_all("share")
        self._strategy.values_were_set(values.get(GLOBAL_STEP))

    def histograms(self) -> dict[str, np.ndarray]:
        return dict(self._call("of_values", "histograms"))

    def next_interval(self, since: int | None) -> int | None:
        return cast("int | None", self._call("of_values", "next_interval", since))

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        self._call("begin_save", prefix, since, aside, self._data.state())
        return _Written(self._call)

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        self._call("of_values", "restore", path, list(deltas))
        self._call_all("share")
        self._strategy.values_were_set(self.global_step())

    def count_rows(self) -> None:
        """Replicas have no dynamic tables."""

    def use_averages(self) -> None:
        self._call("of_values", "use_averages")


class _Written(Future[None]):
    """A checkpoint that another process writes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def done(self) -> bool:
        return bool(self._call("is_written"))

    def result(self, timeout: float | None = None) -> None:
        self._call("finish_save")
