"""The task of a contender's process, and what all contenders need."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.progress import Progress
from benchmarks.workloads import WORKLOADS, Workload

#: Threads (intra-op, inter-op) of every server and worker of every contender: what kdist gives its tasks on two cores.
THREADS = (1, 2)

#: How many steps a framework is asked to run at once, where it can be asked: the best is kept.
STEPS_AT_ONCE = (1, 10, 50)

_TRIAL_SECS = 1.0


@dataclass(frozen=True)
class Task:
    """One process of a contender.

    Attributes:
        workload, optimizer: what to train: a name in `WORKLOADS`; `sgd` or `adam`.
        sync: whether an update is the mean of all workers' gradients.
        num_ps, num_workers: the cluster.
        job, index, jobs: this process in the cluster, and the addresses of all; the empty job starts the others.
        options: what else a contender knows.
        progress: folder for `Progress` files, one per process that counts.
    """

    workload: str
    optimizer: str = "sgd"
    sync: bool = False
    num_ps: int = 2
    num_workers: int = 2
    job: str = ""
    index: int = 0
    jobs: dict[str, list[str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    progress: str = ""

    @property
    def what(self) -> Workload:
        return WORKLOADS[self.workload]

    @property
    def folder(self) -> Path:
        return Path(self.progress)

    def counter(self) -> Progress:
        """The counter of the steps of this process."""
        return Progress(self.folder / f"{self.job or 'chief'}-{self.index}")

    @property
    def processes(self) -> dict[int, Task]:
        """The forked tasks, by process id."""
        told = [(int(path.suffix[1:]), path.read_text()) for path in self.folder.glob("pid.*")]
        return {pid: Task(**json.loads(text)) for pid, text in told}

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def this_task() -> Task:
    """The task of this process."""
    return Task(**json.loads(sys.argv[1]))


def with_addresses(task: Task) -> Task:
    """`task` with a free port for every server and worker."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(task.num_ps + task.num_workers)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in sockets]
    jobs = {"ps": addresses[: task.num_ps], "worker": addresses[task.num_ps :]}
    return replace(task, jobs={job: found for job, found in jobs.items() if found})


def start_processes(main: Callable[[Task], None], task: Task) -> None:
    """Forks a process for each server and worker of a `task` with addresses, and lets each of them be `main`.

    What this process has imported they have as well; it must not have used TensorFlow yet.
    """
    for job, addresses in task.jobs.items():
        for index in range(len(addresses)):
            own = replace(task, job=job, index=index)
            if pid := os.fork():
                (task.folder / f"pid.{pid}").write_text(own.to_json())
                continue
            # linux/prctl.h: it ends with its parent.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            try:
                main(own)
            except BaseException:  # noqa: BLE001 - nothing may go on in the parent's frames
                traceback.print_exc()
            os._exit(1)


def run_processes(main: Callable[[Task], None], task: Task) -> None:
    """Runs `main` for each server and worker until one of them ends, which none should."""
    start_processes(main, task)
    os.wait()
    raise SystemExit(1)


def race(task: Task, runs: Mapping[int, Callable[[], int]]) -> None:
    """Trains without end, by the fastest way.

    Args:
        runs: by steps at once, what runs some steps that way and returns how many.
    """
    rates = {}
    for at_once, run in runs.items():
        run()
        steps, started = 0, time.monotonic()
        while time.monotonic() < started + _TRIAL_SECS:
            steps += run()
        rates[at_once] = steps / (time.monotonic() - started)
    best = max(rates, key=lambda at_once: rates[at_once])
    (task.folder / "best").write_text(str(best))
    progress, steps = task.counter(), 0
    while True:
        steps += runs[best]()
        progress.set(steps)


def serve(task: Task) -> None:
    """Is a TensorFlow server without end."""
    import tensorflow as tf

    tf.distribute.Server(task.jobs, job_name=task.job, task_index=task.index, config=session_config()).join()


def session_config() -> Any:
    """TensorFlow's threads, the same for all."""
    import tensorflow as tf

    return tf.compat.v1.ConfigProto(intra_op_parallelism_threads=THREADS[0], inter_op_parallelism_threads=THREADS[1])


def limit_threads() -> None:
    """The same threads for TensorFlow in this process."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(THREADS[0])
    tf.config.threading.set_inter_op_parallelism_threads(THREADS[1])
