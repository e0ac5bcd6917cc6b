"""One parameter server or worker: `python -m kdist.cluster.processes.server '<TaskOptions as JSON>'`.

The process serves TensorFlow until its standard input closes or its parent exits, so that no task outlives its chief,
however the chief ends (a pipe is closed by the kernel even after `kill -9`). It knows nothing of the model. It writes
`ready` to standard output once it serves; everything else goes to standard error, which is its log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from kdist import log
from kdist._compat import op_libraries
from kdist._compat.imports import quick_import
from kdist.cluster.description import TaskFingerprint
from kdist.cluster.network import sockets
from kdist.cluster.network.names import environment_with, host_and_port
from kdist.cluster.network.port_probe import accepts_connections
from kdist.cluster.network.tcp_timeouts import TcpTimeouts
from kdist.cluster.processes.child import end_with_parent, pipe_of_signals, usable_cores, visible_devices
from kdist.cluster.spec import Membership, Task
from kdist.config.schema import ClusterConfig, RunConfig
from kdist.errors import ChiefStoppedError, ClusterError
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.cluster.processes.chief_board import Chief

READY = b"ready\n"
#: What a worker of this machine writes to the same pipe when it is told to leave.
LEAVES = b"leaves\n"

#: A task that only serves makes no other connections.
_NO_PROXY = {"grpc_proxy": ""}
#: The servers of this process in clusters that others started, for every fit: TensorFlow cannot stop a server.
_servers: dict[str, Any] = {}


@dataclass(frozen=True)
class TaskOptions:
    """The options of one server task; the last three default to those of this process.

    Attributes:
        jobs: addresses (`host:port`) of every task by job.
        intra_op_threads: threads inside one op; 0 lets TensorFlow choose.
        inter_op_threads: threads for ops side by side, also 0; never 1, a single one can wait for itself.
        cores: the CPU cores that the task is bound to; None for any.
        patience: seconds for which a task on another host may be silent; None if all are on this host.
        bind: the network interface at which it listens, see `kdist.cluster.network.sockets`; None for all.
        op_libraries: modules that load ops beside TensorFlow's own, see `kdist._compat.op_libraries`.
        path: Python's import path, for them.
    """

    jobs: dict[str, list[str]]
    job: str
    index: int
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    cores: list[int] | None = None
    patience: float | None = None
    bind: str | None = field(default_factory=sockets.bound_to)
    op_libraries: list[str] = field(default_factory=op_libraries.loaded_by)
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def run(text: str, _descriptors: Mapping[int, int]) -> NoReturn:
    """Serves with `TaskOptions` as JSON until the parent exits; see `kdist.cluster.processes.forkserver`."""
    options = TaskOptions(**json.loads(text))
    name = f"{options.job}:{options.index}"
    # From the first moment on: importing TensorFlow takes seconds.
    end_with_parent(name)
    if sys.platform == "linux" and options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    with quick_import(keras=False):
        import tensorflow as tf

        from kdist.data.python_readers import offer_readers

    offer_readers()
    if options.op_libraries:
        sys.path[:] = options.path
        op_libraries.load(options.op_libraries)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=options.intra_op_threads,
        inter_op_parallelism_threads=options.inter_op_threads,
    )
    # No task has a core to itself.
    is_crowded = options.intra_op_threads > 0 and sum(map(len, options.jobs.values())) >= len(usable_cores())
    # A thread that looks for work for a while before it sleeps takes the core away from the other tasks.
    config.experimental.disable_thread_spinning = is_crowded
    if is_crowded:
        # TensorFlow runs what the chief sends in a pool with a thread for each core that this process may use when the
        # chief connects. A task that joins takes a core from the others, which then need a tenth longer for each step
        # if they have more threads than cores.
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    sockets.bind_to(options.bind)
    os.environ.update(_NO_PROXY)
    server, port = _start_server(options.jobs, Task(options.job, options.index), config)
    if options.patience is not None:
        addresses = [address for hosts in options.jobs.values() for address in hosts]
        TcpTimeouts(addresses, [port], options.patience).start()
    pipe, signals = os.dup(1), pipe_of_signals()
    os.set_inheritable(pipe, False)
    if options.job == "worker":
        # Before the chief knows of this worker, and somebody reads its process id.
        _leave_at_sigterm(pipe, name)
    # Before the chief hears that the task is ready, as whoever waits for that may read the log.
    print(f"{log.now()} {name} serves at {server.target}", file=sys.stderr, flush=True)
    os.write(pipe, READY)
    os.dup2(2, 1)
    while True:
        # Not `signal.pause`, which sleeps on if another thread got the signal.
        os.read(signals, 1)


def _leave_at_sigterm(pipe: int, name: str) -> None:
    """Lets SIGTERM ask the chief to do without this worker: a machine is drained, or its user wants it back.

    A scheduler that sends the signal to all processes sends it to the chief as well, which ends the run then.
    """

    def ask(_number: int, _frame: Any) -> None:
        with suppress(OSError):
            # Not `print`, which this may interrupt.
            os.write(2, f"{log.now()} {name} was told to leave (SIGTERM)\n".encode())
            os.write(pipe, LEAVES)

    signal.signal(signal.SIGTERM, ask)


@environment_with(_NO_PROXY)
def serve_until_done(
    membership: Membership,
    config: ClusterConfig,
    before_serving: Callable[[Callable[[], None]], None],
    *,
    fingerprint: TaskFingerprint | None = None,
    log_device_placement: bool = RunConfig.log_device_placement,
) -> None:
    """Runs this externally started task until the chief finishes.

    Args:
        before_serving: called when the chief has come, and may need this task; its argument asks the chief to do
            without it.
        fingerprint: of this task; None compares nothing.

    Raises:
        ClusterError: the address is in use, or the chief never came, or died.
        ConfigError: this task differs from the chief.
        ChiefStoppedError: it was stopped before the end of the run, and `cluster.wait_for_next_chief` is set.
    """
    task, spec = membership.task, membership.spec
    visible = visible_devices(task, config.devices)
    if visible is not None or task.job == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""
    with quick_import(keras=False):
        import tensorflow as tf

    from kdist.cluster.processes.chief_board import Chief
    from kdist.data.python_readers import offer_readers

    offer_readers()
    address = spec.address(task)
    if address not in _servers:
        if accepts_connections(address):
            raise ClusterError(f"{task} cannot serve at {address}: the address is in use")
        sockets.bind_to(config.bind)
        options = tf.compat.v1.ConfigProto(log_device_placement=log_device_placement)
        try:
            _servers[address], _ = _start_server(spec.jobs, task, options)
        except tf.errors.OpError as error:
            raise ClusterError(f"{task} cannot serve at {address}: {error.message}") from error
    chief = Chief(spec, task, config.patience)
    log.say(f"kdist {__version__} | {task} of {spec.shape} | at {address}, chief {chief}")
    timeouts = TcpTimeouts(spec.addresses.values(), [spec.port(task)], config.patience)
    timeouts.start()
    try:
        deadline = time.monotonic() + config.start_timeout
        chief.wait_for_it(config.start_timeout)
        if fingerprint is not None:
            chief.compare(fingerprint, deadline - time.monotonic())
        before_serving(chief.ask_to_leave)
        is_at_end = chief.wait_until_done()
    finally:
        timeouts.stop()
        chief.stop()
    end_task(chief, task, config, is_at_end=is_at_end)


def end_task(chief: Chief, task: Task, config: ClusterConfig, *, is_at_end: bool) -> None:
    """Says why this externally started task ends, and ends the process in the way that its scheduler should see.

    Raises:
        ChiefStoppedError: the chief was stopped before the end of the run, and `cluster.wait_for_next_chief` is set.
        SystemExit: this task was told to leave, and somebody is to start it again.
    """
    if config.wait_for_next_chief and not is_at_end:
        raise ChiefStoppedError(f"{task}: the chief ({chief}) was told to stop")
    log.say(f"done  | {task} | {'it has left' if chief.has_left else 'the chief has finished'}")
    if config.wait_for_next_chief and chief.has_left and chief.has_asked:
        # Whoever replaces tasks, as a Job of Kubernetes does, takes 0 for the end of this one's work.
        raise SystemExit(128 + signal.SIGTERM)


def _start_server(jobs: Mapping[str, Sequence[str]], task: Task, config: Any) -> tuple[Any, int]:
    import tensorflow as tf

    port = host_and_port(jobs[task.job][task.index])[1]
    server = tf.distribute.Server(
        tf.train.ClusterSpec(jobs),
        job_name=task.job,
        task_index=task.index,
        protocol="grpc",
        config=config,
        # Nobody is answered before the port is bound.
        start=False,
    )
    sockets.bind_port(port)
    server.start()
    return server, port


if __name__ == "__main__":
    run(sys.argv[1], {})
