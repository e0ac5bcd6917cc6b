"""One process of a fit that runs in processes of its own.

`run` is called in a fork of a process that has imported TensorFlow, or by `python -m
kdist.launch.worker_main '<WorkerOptions as JSON>'`. It joins the other workers, reads the request from a file, runs the
fit, and leaves the outcome in another file. Worker 0 is the chief; the process that started it shows its standard
output.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from kdist import forks, log
from kdist._compat import op_libraries
from kdist._compat.quick_import import quick_import
from kdist.cluster.process import end_with_parent, name_process
from kdist.cluster.spec import ClusterSpec, Membership, Task
from kdist.console import live
from kdist.data.pickling import unpacked_program
from kdist.errors import KdistError, TaskError, traceback_of
from kdist.launch import signals
from kdist.launch.worker_messages import (
    LINE,
    WARNING,
    WorkerOptions,
    WorkerOutcome,
    WorkerRequest,
    set_values,
    values_of,
)
from kdist.run.files import written_whole


def run(options: str, descriptors: Mapping[int, int]) -> NoReturn:
    """Runs what `WorkerOptions`, as JSON, say: see `kdist.cluster.task_processes`."""
    given = json.loads(options)
    for name in ("live_line", "conversation"):
        given[name] = descriptors.get(given[name], given[name])
    main(WorkerOptions(**given))


def main(options: WorkerOptions) -> NoReturn:
    """Runs the fit as one of its workers; ends the process."""
    is_chief = options.index == 0
    if is_chief:
        # The others end with it, and ignore what a scheduler sends to all of them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signals.stop_before_training()
    end_with_parent(ignored=()) if is_chief else end_with_parent()
    name_process(str(Task("worker", options.index)))
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    sys.path[:] = options.path
    if is_chief:
        # In one piece: other threads print, too.
        warnings.showwarning = lambda message, *_, **__: print(f"{WARNING}{message}\n", end="", flush=True)
        log.relay = lambda line: print(f"{LINE}{line.to_json()}\n", end="", flush=True)
    else:
        # Into its log.
        log.relay = lambda line: print(f"{log.now()} {line}", flush=True)
        warnings.formatwarning = lambda message, *_, **__: f"{log.now()} {message}\n"
    if options.live_line is not None:
        live.relay = live.pipe_writer(options.live_line)
    folder = Path(options.folder)
    try:
        outcome = _run(options, folder)
    except BaseException as error:  # noqa: BLE001 - raised in the process that started this one
        outcome = WorkerOutcome(error)
    if outcome.error is not None:
        print(f"{log.now()} {Task('worker', options.index)} failed", file=sys.stderr)
        print(traceback_of(outcome.error), end="", file=sys.stderr)
        sent = signals.asked_to_exit() or _sendable(outcome.error, str(Task("worker", options.index)))
        outcome = replace(outcome, error=sent)
    with written_whole(folder / f"outcome-{options.index}") as path:
        path.write_bytes(cloudpickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    forks.end_daemons()
    # At a normal exit TensorFlow may wait for a worker that has exited.
    os._exit(0 if outcome.error is None else 1)


def _run(options: WorkerOptions, folder: Path) -> WorkerOutcome:
    with quick_import():
        import tensorflow as tf

        from kdist.launch.conversation import Conversation
        from kdist.launch.external_task import ExternalTask
        from kdist.launch.in_process import InProcess
        from kdist.launch.stand_ins import METRICS, SESSION, CallbacksElsewhere, UsersHook, answer, hook_for
        from kdist.model.metrics import MetricReader
        from kdist.session import TrainSession
        from kdist.strategies.mirrored import make_logical_cpus
        from kdist.strategies.multi_worker_mirrored import join
        from kdist.strategies.prepared_training import prepare

    gc.freeze()
    tf.config.threading.set_intra_op_parallelism_threads(options.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.inter_op_threads)
    packed = (folder / "request").read_bytes()
    if options.num_cpus:
        make_logical_cpus(options.num_cpus)
    membership = None
    if options.workers:
        spec = ClusterSpec((), tuple(options.workers))
        membership = Membership(spec, Task("worker", options.index), started_by_kdist=True)
        # Before the request is read: models and tensors in it run TensorFlow's first ops.
        join(membership, options.start_timeout, options.bind)
    (folder / f"started-{options.index}").touch()
    op_libraries.load(options.op_libraries)
    request: WorkerRequest = unpacked_program(packed)
    del packed
    signals.exit_at_once = os._exit
    fit = replace(request.fit, strategy=replace(request.fit.strategy, membership=membership))
    model = fit.source.model
    prepare(fit.training_spec(fit.training_data), 1)
    set_values(model, request.values)
    if membership is not None and not membership.is_chief:
        ExternalTask(membership).launch(fit)
        return WorkerOutcome()
    assert options.conversation is not None
    objects: dict[str, Any] = {}
    shared = {TrainSession: SESSION, MetricReader: METRICS}
    with_user = Conversation(Connection(options.conversation), partial(answer, objects), shared, objects)
    hooks = [hook_for(hook, with_user) if isinstance(hook, UsersHook) else hook for hook in request.hooks]
    callbacks = partial(CallbacksElsewhere, conversation=with_user, objects=objects)
    outcome = InProcess(callbacks).launch(replace(fit, hooks=hooks))
    if outcome.error is not None:
        return WorkerOutcome(outcome.error, outcome.result)
    history = outcome.history
    return WorkerOutcome(
        result=outcome.result,
        history={"epoch": history.epoch, "history": history.history, "params": history.params},
        values=values_of(model),
    )


def _sendable(error: BaseException, task: str) -> BaseException:
    """The error itself if it is kdist's own or a signal's, else a `TaskError` that describes it."""
    return error if isinstance(error, (KdistError, KeyboardInterrupt, SystemExit)) else TaskError(task, error)


if __name__ == "__main__":
    run(sys.argv[1], {})
