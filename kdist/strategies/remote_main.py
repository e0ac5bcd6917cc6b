"""The other end of a `Remote` strategy."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from kdist import forks
from kdist._compat import op_libraries
from kdist._compat.quick_import import quick_import
from kdist.cluster.process import end_with_parent, name_process
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.data.pickling import pickled, unpacked_program, unpickled
from kdist.errors import KdistError, TaskError, traceback_of


def run(options: str, descriptors: Mapping[int, int]) -> NoReturn:
    given = json.loads(options)
    end_with_parent()
    task = Task("worker", given["index"])
    name_process(str(task))
    if given["cores"] is not None:
        os.sched_setaffinity(0, given["cores"])
    sys.path[:] = given["path"]
    pipe = Connection(descriptors.get(given["pipe"], given["pipe"]))
    code = 0
    try:
        _serve(given, task, pipe)
    except BaseException as error:  # noqa: BLE001
        print(traceback_of(error), file=sys.stderr)
        code = 1
        if task.index == 0:
            sent = error if isinstance(error, (KdistError, SystemExit)) else TaskError(str(task), error)
            pipe.send_bytes(pickled((True, sent)))
    sys.stdout.flush(), sys.stderr.flush()
    forks.end_daemons()
    os._exit(code)


def _serve(given: Mapping[str, Any], task: Task, pipe: Connection) -> None:
    with quick_import():
        import tensorflow as tf

        from kdist.config.schema import MirroredOptions
        from kdist.strategies.mirrored import Mirrored, make_logical_cpus
        from kdist.strategies.multi_worker_mirrored import MultiWorkerMirrored, join
        from kdist.strategies.remote import ArrivingBatches, RemoteFacts

    gc.freeze()
    tf.config.threading.set_intra_op_parallelism_threads(given["intra_op_threads"])
    tf.config.threading.set_inter_op_parallelism_threads(given["inter_op_threads"])
    if given["num_cpus"]:
        make_logical_cpus(given["num_cpus"])
    strategy: Any
    if given["workers"]:
        membership = Membership(ClusterSpec((), tuple(given["workers"])), task, started_by_kdist=True)
        join(membership, given["start_timeout"], given["bind"])
        strategy = MultiWorkerMirrored(membership, step_timeout=given["step_timeout"], patience=given["patience"])
    else:
        strategy = Mirrored(options=MirroredOptions(given["num_devices"]))
    op_libraries.load(given["op_libraries"])
    source, spec = unpacked_program(Path(given["request"]).read_bytes())
    data = spec.data
    if spec.has_splits:
        data = ArrivingBatches(spec.data)
    spec = replace(spec, model=getattr(source, "model", source), data=data)
    _, (values,) = unpickled(pipe.recv_bytes())
    if task.index:
        strategy.follow(spec)
        return
    strategy.start(spec)
    strategy.values.write({name: value for name, value in values.items() if name in strategy.values.shapes})
    facts = RemoteFacts(strategy.num_replicas, dict(strategy.values.shapes), strategy.values.by_rows)
    pipe.send_bytes(pickled((False, facts)))
    while True:
        name, arguments = unpickled(pipe.recv_bytes())
        try:
            if name == "call":
                strategy.warming_up = False
                size, given_arguments = arguments
                strategy.received = given_arguments
                result: Any = strategy._call_packed(size)
            else:
                result = getattr(strategy.values, arguments[0])(*arguments[1:])
            message = pickled((False, result))
        except (KdistError, tf.errors.OpError, OSError) as error:
            message = pickled((True, error if isinstance(error, KdistError) else RuntimeError(str(error))))
        pipe.send_bytes(message)
