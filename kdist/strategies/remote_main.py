"""A worker of a `Remote` strategy: the other end of its pipe.

`run` is called in a fork of a process that has imported TensorFlow, or by `python -m kdist.strategies.remote_main
'<options as JSON>'`. Worker 0 does what it is asked for over the pipe, and answers; the others take part.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kdist import forks, log
from kdist._compat import op_libraries
from kdist._compat.imports import quick_import
from kdist.cluster.network import sockets
from kdist.cluster.processes.child import end_with_parent
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.data.pickling import dumps, loads, unpack_program
from kdist.errors import KdistError, TaskError, traceback_of

if TYPE_CHECKING:
    import numpy as np

    from kdist.data.epoch_lengths import EpochCount, EpochLengths
    from kdist.parameters.tables.changed_rows import DeltaBase
    from kdist.strategies.all_reduce import AllReduce


def run(options: str, descriptors: Mapping[int, int]) -> NoReturn:
    """Runs a worker with the options of `Processes`; ends the process. See `kdist.cluster.processes.forkserver`."""
    given = json.loads(options)
    # A scheduler signals all processes: this one ends with the session's, which saves what it holds.
    task = Task("worker", given["index"])
    end_with_parent(str(task))
    if sys.platform == "linux" and given["cores"] is not None:
        os.sched_setaffinity(0, given["cores"])
    sys.path[:] = given["path"]
    log.relay = lambda line: print(f"{log.now()} {line}", flush=True)
    warnings.formatwarning = lambda message, *_, **__: f"{log.now()} {message}\n"
    pipe, code = Connection(descriptors.get(given["pipe"], given["pipe"])), 0
    try:
        _work(given, task, pipe)
    except BaseException as error:  # noqa: BLE001 - raised in the process with the session
        print(f"{log.now()} {task} failed\n{traceback_of(error)}", end="", file=sys.stderr)
        code = 1
        pipe.send_bytes(dumps((True, error if isinstance(error, KdistError) else TaskError(str(task), error))))
    sys.stdout.flush()
    sys.stderr.flush()
    forks.end_daemons()
    # At a normal exit TensorFlow may wait for a worker that has exited.
    os._exit(code)


def _work(given: Mapping[str, Any], task: Task, pipe: Connection) -> None:
    with quick_import():
        import tensorflow as tf

        from kdist._compat.tensorflow import let_idle_threads_sleep
        from kdist.strategies.mirrored import make_logical_cpus
        from kdist.strategies.rounds import join_all

    gc.freeze()
    tf.config.threading.set_intra_op_parallelism_threads(given["intra_op_threads"])
    tf.config.threading.set_inter_op_parallelism_threads(given["inter_op_threads"])
    if given["cores"]:
        # It has one core, from which a thread that looks for work would keep the others.
        let_idle_threads_sleep()
    packed = Path(given["request"]).read_bytes()
    if given["num_cpus"]:
        make_logical_cpus(given["num_cpus"])
    membership = None
    if given["workers"]:
        membership = Membership(ClusterSpec((), tuple(given["workers"])), task, started_by_kdist=True)
        # Before the request is read: models and tensors in it run TensorFlow's first ops.
        sockets.bind_to(given["bind"])
        join_all(membership, given["start_timeout"])
    op_libraries.load(given["op_libraries"])
    make, source, spec, values = unpack_program(packed)
    del packed
    spec = replace(spec, model=getattr(source, "model", source))
    strategy: Any = make(membership)
    strategy.start(spec)
    if not task.index:
        strategy.values.write({name: value for name, value in values.items() if name in strategy.values.shapes})
        facts = strategy.num_replicas, dict(strategy.values.shapes), strategy.values.by_rows
        pipe.send_bytes(dumps((False, facts)))
    del source, values
    served = _Served(task, strategy, spec.data)
    while True:
        try:
            name, arguments = loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            is_error, content = False, getattr(served, name)(*arguments)
        except (KdistError, tf.errors.OpError, OSError) as error:
            if task.index:
                raise
            is_error, content = True, error
        if not task.index:
            pipe.send_bytes(dumps((is_error, content)))


class _Served:
    """The functions that the process with the session calls."""

    _written: Future[None]

    def __init__(self, task: Task, strategy: AllReduce, data: Any) -> None:
        self._task = task
        self._strategy = strategy
        self._data = data
        self._portions: Iterator[Mapping[str, np.ndarray]] = iter(())

    def run(self, num_steps: int, told_of_data: Sequence[Any] | None) -> np.ndarray:
        """Runs steps; returns the logs of all replicas, float64 `[replicas, num_steps, n]`."""
        import tensorflow as tf

        if told_of_data is not None:
            self._data.arrived = told_of_data
        try:
            return self._strategy.call(num_steps)
        except tf.errors.OpError as error:
            raise TaskError(str(self._task), error) from error

    def share(self) -> None:
        self._strategy.share()

    def begin_data_at(self, count: EpochCount, lengths: EpochLengths | None) -> None:
        self._strategy.begin_data_at(count, lengths)

    def of_values(self, name: str, *arguments: Any) -> Any:
        return getattr(self._strategy.values, name)(*arguments)

    def first_portion(self, names: Collection[str] | None) -> Mapping[str, np.ndarray] | None:
        self._portions = self._strategy.values.portions(names)
        return self.next_portion()

    def next_portion(self) -> Mapping[str, np.ndarray] | None:
        return next(self._portions, None)

    def begin_save(self, prefix: Path, since: DeltaBase | None, aside: bool, data_state: str | None) -> None:
        if data_state is not None:
            self._data.state_there = data_state
        self._written = self._strategy.values.begin_save(prefix, since, aside=aside)

    def is_written(self) -> bool:
        return self._written.done()

    def finish_save(self) -> None:
        self._strategy.values.wait_for(self._written)


if __name__ == "__main__":
    run(sys.argv[1], {})
