"""`Remote`: an all-reduce strategy whose replicas are in processes of their own on this machine.

TensorFlow can join other workers, and split the CPU into devices, only before its first op in a process. So the replicas
run in processes that kdist starts, and this process, which has the session, calls worker 0 over a pipe. What waits here
for a result watches all of them. `kdist.strategies.remote_main` is the other end.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kdist import forks
from kdist._compat import op_libraries
from kdist.cluster.forkserver import TaskProgram
from kdist.cluster.held_ports import HeldPorts
from kdist.cluster.local import available_cores, log_path, own_cores_of, thread_budget
from kdist.cluster.process import end_children, how_it_ended, log_tail, task_environment
from kdist.cluster.sigstop_watchdog import Stopped
from kdist.cluster.spec import ClusterShape, Task
from kdist.cluster.task_processes import TaskProcess, TaskProcesses
from kdist.config.schema import ClusterConfig
from kdist.data.base import DataContext, TrainingData
from kdist.data.pickling import packed_program, pickled, unpickled
from kdist.errors import ClusterError
from kdist.model.state import read_from_model
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.strategies.base import TrainingSpec
from kdist.strategies.prepared_training import prepare
from kdist.strategies.store_backed import StoreBackedStrategy
from kdist.strategies.traced_calls import CallLogs, StepLogs
from kdist.strategies.values import Values

_POLL_SECS = 0.1
_STOP_SECS = 5.0


@dataclass(frozen=True)
class RemoteOptions:
    """What a process has to know before it may import TensorFlow."""

    index: int
    workers: list[str]
    start_timeout: float
    step_timeout: float
    patience: float
    num_devices: int | None
    num_cpus: int
    intra_op_threads: int
    inter_op_threads: int
    request: str
    path: list[str]
    pipe: int
    bind: str | None
    cores: list[int] | None
    op_libraries: list[str]


@dataclass(frozen=True)
class RemoteFacts:
    """What the other end says of itself when it has started."""

    num_replicas: int
    shapes: Mapping[str, tuple[int, ...]]
    by_rows: frozenset[str]


class ArrivingBatches(TrainingData):
    """Data of which the other process has the splits."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def specs(self, num_workers: int) -> list[Any]:
        return self._data.specs(num_workers)

    def trace_transfer(self, num_workers: int) -> None:
        self._data.trace_transfer(num_workers)

    def dataset(self, context: DataContext, *arguments: Any) -> Any:
        return self._data.dataset(context, *arguments)


class Remote(StoreBackedStrategy):
    """The strategy `name` in processes of its own."""

    name: ClassVar[str] = "remote"

    def __init__(self, name: str, shape: ClusterShape, cluster: ClusterConfig, num_devices: int | None, num_cpus: int) -> None:
        self.name = name  # type: ignore[misc]
        self._shape = shape
        self._cluster = cluster
        self._num_devices, self._num_cpus = num_devices, num_cpus
        self._num_workers = max(1, shape.num_workers)
        self.num_replicas = self.batches_per_step = self._num_workers * (num_devices or 1)
        self._at_end = ExitStack()
        self._processes: list[TaskProcess] = []
        self._traced: set[int] = set()
        self._stopped = Stopped()

    def start(self, spec: TrainingSpec) -> None:
        self._log_dir = spec.log_dir
        self._launch(spec)
        self._prepared = prepare(spec, self.num_replicas, self.num_replicas)
        self._prepared.check_fixed_tables(self.name)
        if self.num_replicas > 1:
            self._prepared.check_assigned(self.name)
        self._deadline: float | None = time.monotonic() + self._cluster.start_timeout
        values = read_from_model(spec.model)
        facts: RemoteFacts = self._ask("start", values)
        self._deadline = None
        self._values = RemoteValues(self._ask, facts, self._have_set)
        self._logs = CallLogs(self._prepared.replica_step)
        self._sizer = self._prepared.sizer(num_workers=1)

    def _launch(self, spec: TrainingSpec) -> None:
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        folder = self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="kdist-"))
        request = Path(folder) / "request"
        sent = replace(spec, model=None, stays_on_servers=bool, has_splits=spec.data.splits is not None)
        request.write_bytes(packed_program((spec.source or spec.model, sent)))
        ports = self._at_end.enter_context(HeldPorts(self._num_workers if self._num_workers > 1 else 0))
        workers = [f"127.0.0.1:{port}" for port in ports.numbers]
        shape = ClusterShape(0, self._num_workers)
        intra_op, inter_op = thread_budget("worker", shape, available_cores())
        started = TaskProcesses(log_path(spec.log_dir, Task("worker", 0)), train=True)
        self._at_end.callback(started.close)
        self._at_end.callback(lambda: end_children(self._processes, _STOP_SECS))
        self._pipes: list[Connection] = []
        for index in range(self._num_workers):
            here, there = Pipe()
            self._at_end.enter_context(here)
            forks.keep_from_children(here)
            options = RemoteOptions(
                index,
                workers,
                self._cluster.start_timeout,
                self._cluster.step_timeout,
                self._cluster.patience,
                self._num_devices,
                self._num_cpus,
                intra_op,
                inter_op,
                str(request),
                sys.path,
                there.fileno(),
                self._cluster.bind,
                own_cores_of(Task("worker", index), shape) if self._num_workers > 1 else None,
                op_libraries.loaded_by(),
            )
            with there:
                program = TaskProgram(
                    "kdist.strategies.remote_main",
                    json.dumps(asdict(options)),
                    task_environment(Task("worker", index), self._cluster.devices),
                    log_path(spec.log_dir, Task("worker", index)),
                    prints_to_log=True,
                    pass_fds=[there.fileno()],
                )
                self._processes.append(started.start(program))
            self._pipes.append(here)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Calls the other end."""
        for pipe in self._pipes if name == "start" else self._pipes[:1]:
            self._send(pipe, (name, arguments))
        return self._answer()

    def _send(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send_bytes(pickled(message))
        except OSError:
            self._check()
            raise ClusterError("a worker has closed its pipe") from None

    def _answer(self) -> Any:
        pipe = self._pipes[0]
        while not pipe.poll(_POLL_SECS):
            self._check()
        try:
            is_error, content = unpickled(pipe.recv_bytes())
        except (EOFError, OSError):
            self._processes[0].wait()
            self._check()
            raise ClusterError("worker:0 has closed its pipe") from None
        if is_error:
            raise content
        return content

    def _check(self) -> None:
        for index, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                log = log_path(self._log_dir, Task("worker", index))
                raise ClusterError(f"{Task('worker', index)} died ({how_it_ended(code)}){log_tail(log)}")
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise ClusterError(f"the workers did not respond within {self._cluster.start_timeout:g} s (cluster.start_timeout)")

    def _next_logs(self, may_begin: int, interrupted: Callable[[], bool]) -> StepLogs | None:
        splits, data = self._splits, self._prepared.spec.data
        if interrupted() or (splits is not None and not splits.look()):
            return None
        size = self._sizer.next_size(may_begin)
        self.warming_up |= size not in self._traced
        self._traced.add(size)
        arguments = None
        if splits is not None:
            replicas = range(self.num_replicas)
            arguments = [[a.numpy() for a in data.arguments(replica, self.num_replicas)] for replica in replicas]
        packed = self._ask("call", size, arguments)
        if splits is not None:
            for replica in range(self.num_replicas):
                splits.advance(replica)
        return self._logs.join([self._logs.unpack(row) for row in packed])

    @property
    def pids(self) -> Mapping[Task, int]:
        return {Task("worker", i): process.pid for i, process in enumerate(self._processes)}

    def stop(self) -> None:
        self._at_end.close()
        self._processes = []


class RemoteValues(Values):
    """The values of the other end."""

    def __init__(self, ask: Callable[..., Any], facts: RemoteFacts, has_set: Callable[[int | None], None]) -> None:
        self._ask = ask
        self._facts = facts
        self._has_set = has_set

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._facts.shapes

    @property
    def by_rows(self) -> frozenset[str]:
        return self._facts.by_rows

    def global_step(self) -> int:
        return int(self._ask("values", "global_step"))

    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        yield self._ask("values", "read", names)

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        self._ask("values", "write", dict(values))
        self._has_set(int(values["global_step"]) if "global_step" in values else None)

    def histograms(self) -> dict[str, np.ndarray]:
        return dict(self._ask("values", "histograms"))

    def next_interval(self, since: int | None) -> int | None:
        found: int | None = self._ask("values", "next_interval", since)
        return found

    def save(self, prefix: Path, since: DeltaBase | None = None) -> None:
        self._ask("values", "save", prefix, since)

    def begin_save(self, prefix: Path, since: DeltaBase | None = None) -> Future[None]:
        self.save(prefix, since)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        self._ask("values", "restore", path, list(deltas))
        self._has_set(self.global_step())

    def count_rows(self) -> None:
        pass

    def use_averages(self) -> None:
        self._ask("values", "use_averages")
