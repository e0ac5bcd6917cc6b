"""One chief and hundreds of workers, by simulation: `python -m benchmarks.scale`, about 15 minutes.

TensorFlow servers of many tasks run in a few processes, and a step rests instead of computing, so that the chief is
what limits. For each number of workers and servers: seconds to connect, and until every worker has prepared its step;
steps per second beside the ideal; the chief's CPU for each step, its memory and threads; seconds for a save, for a
worker that leaves, until one that died is noticed, and for the end. Numbers of workers and servers, seconds of a step,
and steps of a call may be given: `python -m benchmarks.scale 64 4 0.5 4`. A simulated worker takes about 60 MB.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from benchmarks.measured import Figures, measured, run
from benchmarks.workloads import sleep
from kdist.cluster.network.sockets import held_ports
from kdist.cluster.spec import Cluster, ClusterShape, ClusterSpec, Task
from kdist.strategies.base import Strategy
from kdist.strategies.parameter_server import ParameterServer
from kdist.threads import in_thread

#: Workers and servers, the seconds that a step rests, and the steps of a call: 128 calls a second are what two cores
#: can simulate.
_RUNS = [
    (1, 1, 0.5, 1),
    (8, 1, 0.5, 1),
    (64, 1, 0.5, 1),
    (64, 4, 0.5, 1),
    (64, 16, 0.5, 1),
    (256, 4, 2.0, 1),
    (256, 16, 2.0, 1),
    (256, 4, 0.5, 4),
    (512, 4, 4.0, 1),
]
_TASKS_PER_PROCESS = 32
_BYTES_PER_WORKER = 60e6
_MEASURED_SECS, _NOTICED_SECS = 20.0, 120.0
#: Of the simulated tasks. Each server would have 64 threads that receive, and each thread a heap.
_ENVIRONMENT = {"TF_GRPC_WORKER_CACHE_QUEUES": "2", "TF_NUM_INTEROP_THREADS": "2", "MALLOC_ARENA_MAX": "2"}


class ManyServers(Cluster):
    """Servers of the tasks of `shape`, many of them in one process, except for the last two workers.

    One of these leaves, and the other one dies.

    Attributes:
        ready_at: when all of them served.
    """

    ready_at: ClassVar[float]

    def __init__(self, shape: ClusterShape) -> None:
        self._shape = shape
        self._processes: list[subprocess.Popen[bytes]] = []
        self._own: dict[Task, subprocess.Popen[bytes]] = {}
        self.spec = ClusterSpec((), ())

    def launch(self) -> None:
        with held_ports(len(self._shape.tasks) + 1) as (*ports, own):
            addresses = [f"127.0.0.1:{port}" for port in ports]
        self.chief_address = f"127.0.0.1:{own}"
        self.spec = ClusterSpec(tuple(addresses[: self._shape.num_ps]), tuple(addresses[self._shape.num_ps :]))
        servers, workers = self.spec.of_job("ps"), self.spec.of_job("worker")
        many = workers[:-2]
        groups = [many[i : i + _TASKS_PER_PROCESS] for i in range(0, len(many), _TASKS_PER_PROCESS)]
        for group in (servers, *groups):
            self._serve(group)
        self._own = {worker: self._serve([worker]) for worker in workers[-2:]}

    def _serve(self, tasks: Sequence[Task]) -> subprocess.Popen[bytes]:
        # Standard input keeps it running.
        command = [sys.executable, "-m", "benchmarks.scale", "--serve"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _ENVIRONMENT
        )
        assert process.stdin is not None
        what = {"jobs": self.spec.jobs, "tasks": [(task.job, task.index) for task in tasks]}
        process.stdin.write(json.dumps(what).encode() + b"\n")
        process.stdin.flush()
        self._processes.append(process)
        return process

    def wait(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit("a process with servers has ended")
        type(self).ready_at = time.monotonic()

    def lost_tasks(self) -> dict[Task, str]:
        return {task: "died" for task, process in self._own.items() if process.poll() is not None}

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        for process in self._processes if tasks is None else [self._own[task] for task in tasks if task in self._own]:
            process.kill()
            process.wait()
        return True

    @property
    def pids(self) -> dict[Task, int]:
        return {task: process.pid for task, process in self._own.items()}

    def dismiss(self, leaving: Collection[Task]) -> None:
        self.spec = self.spec.without(list(leaving))
        self.kill(leaving)
        for task in leaving:
            del self._own[task]

    def stop(self, *, will_resume: bool = False) -> None:
        self.kill()


class OnManyServers(ParameterServer):
    """`parameter_server` on `ManyServers`."""

    def __init__(self, shape: ClusterShape, _make_cluster: Any, **options: Any) -> None:
        super().__init__(shape, lambda _: ManyServers(shape), **options)


def chief(run_dir: str, workers: str, servers: str, rest_secs: str, steps_per_call: str) -> Figures:
    """Trains on so many simulated workers and servers, with steps that rest for so many seconds."""
    import keras

    import kdist

    number, secs, at_once = int(workers), float(rest_secs), int(steps_per_call)
    x = np.full((4 * number, 1), secs, np.float32)
    layers = [keras.layers.Input((1,)), keras.layers.Lambda(sleep, output_shape=lambda shape: shape)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    hook = _hook(number, secs, at_once * secs)
    cluster = f"{servers}ps{workers}w"
    trainer = kdist.Trainer(model, cluster, OnManyServers, run_dir=run_dir, hooks=[hook], steps_per_call=at_once)
    trainer.fit(x, np.arange(len(x)) % 10, batch_size=1, steps=10**7, verbose=0)
    return {**hook.figures, "stop_secs": round(time.monotonic() - hook.stopped_at, 1)}


def _hook(number: int, rest_secs: float, call_secs: float) -> Any:
    """A hook that measures steps, then a save, a worker that leaves, and one that dies; then the run ends."""
    import kdist

    class Measures(kdist.hooks.Hook):
        def __init__(self) -> None:
            self.figures: Figures = {}
            self.stopped_at = 0.0
            self._num_steps = 0
            #: The workers that have finished a step.
            self._prepared: set[int] = set()
            #: When the session began, and when measuring did; the steps by then and the CPU time of this process.
            self._began = 0.0
            self._since: tuple[float, int, float] | None = None
            self._resize: Any = None
            self._noticed: Future[float] | None = None

        def after_create_session(self, session: Any) -> None:
            self._began = time.monotonic()
            self.figures["connect_secs"] = round(self._began - ManyServers.ready_at, 1)

        def after_run(self, context: Any, values: Any) -> None:
            now, session = time.monotonic(), context.session
            self._num_steps += values.num_steps
            if self._since is None:
                self._prepared |= values.gradient_counts.keys()
                if len(self._prepared) == number:
                    self.figures["prepare_secs"] = round(now - self._began - call_secs, 1)
                    self._since = now, self._num_steps, time.process_time()
            elif "steps_per_sec" not in self.figures:
                if now - self._since[0] >= max(_MEASURED_SECS, 4 * call_secs):
                    self._measure(now)
                    began = time.monotonic()
                    session.save(keep=1)
                    # Of these, up to `call_secs` for the calls in flight.
                    self.figures["save_secs"] = round(time.monotonic() - began, 2)
                    self._resize = session.resize(workers=number - 1) if number > 2 else None
            elif self._resize is not None:
                if self._resize.done():
                    self.figures["leave_secs"] = round(self._resize.result().seconds, 2)
                    self._resize = None
                    self._noticed = in_thread(partial(_secs_until_lost, session.strategy, Task("worker", number - 2)))
            elif self._noticed is None or self._noticed.done():
                if self._noticed is not None:
                    self.figures["loss_noticed_secs"] = round(self._noticed.result(), 2)
                self.stopped_at = time.monotonic()
                context.request_stop("measured")

        def _measure(self, now: float) -> None:
            assert self._since is not None
            at, before, cpu = self._since
            steps = self._num_steps - before
            self.figures |= {
                "steps_per_sec": round(steps / (now - at), 1),
                "of_ideal": round(steps / (now - at) * rest_secs / number, 3),
                "chief_ms_per_step": round((time.process_time() - cpu) / steps * 1000, 2),
                "chief_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "chief_threads": len(os.listdir("/proc/self/task")),
            }

        def due_in(self, step: int) -> int:
            return max(1, number // 4)

    return Measures()


def _secs_until_lost(strategy: Strategy, worker: Task) -> float:
    """Kills a worker; the seconds until the chief knows, which hooks learn when the next steps have ended."""
    began = time.monotonic()
    os.kill(strategy.pids[worker], signal.SIGKILL)
    while not strategy.worker_losses:
        if time.monotonic() - began > _NOTICED_SECS:
            raise RuntimeError(f"{worker} was killed, and the chief has not noticed it within {_NOTICED_SECS:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


def serve() -> None:
    """Serves as the tasks that standard input names, until it closes."""
    what = json.loads(sys.stdin.readline())
    import tensorflow as tf

    # All servers of a process share one pool, and a step that rests holds a thread of it.
    num_threads = 2 * max(8, len(what["tasks"]))
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=num_threads)
    config.experimental.disable_thread_spinning = True
    spec = tf.train.ClusterSpec(what["jobs"])
    servers = [tf.distribute.Server(spec, job_name=job, task_index=i, config=config) for job, i in what["tasks"]]
    print("ready", len(servers), flush=True)
    sys.stdin.read()
    os._exit(0)


MEASUREMENTS: dict[str, Callable[..., Figures]] = {"chief": chief}


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
    given = sys.argv[1:]
    runs = _RUNS
    if len(given) >= 3:
        runs = [(int(given[0]), int(given[1]), float(given[2]), int(given[3]) if len(given) > 3 else 1)]
    room = psutil.virtual_memory().available + psutil.swap_memory().free
    with tempfile.TemporaryDirectory() as folder:
        for workers, servers, rest_secs, steps_per_call in runs:
            name = f"{servers}ps{workers}w, steps of {rest_secs:g} s, {steps_per_call} in a call"
            if workers * _BYTES_PER_WORKER > room:
                print(f"{name}: left out, it takes {workers * _BYTES_PER_WORKER / 1e9:.0f} GB of memory", flush=True)
                continue
            run_dir = str(Path(folder) / f"{workers} {servers}")
            how = map(str, (workers, servers, rest_secs, steps_per_call))
            figures = measured("benchmarks.scale", "chief", run_dir, *how)
            print(f"{name}:", figures, flush=True)


if __name__ == "__main__":
    run(MEASUREMENTS, main)
