"""Connects this process to a cluster without breaking the variables that it already holds.

TensorFlow's own `ParameterServerStrategy` connects in a way that breaks the user's process twice. It renames the job of
this process from `localhost` to `chief`, so that every earlier variable is at an address that no longer exists. And it
sends a session config that differs from that of this process; TensorFlow then replaces the local devices, and assigning
to an earlier variable silently does nothing. Connecting under the old name, with the config of this process, keeps the
devices and everything on them.

TensorFlow serves at the address of this process until that ends, with ninety threads. The next cluster is connected to
the same server.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from kdist._compat import tensorflow as tf_compat
from kdist.cluster.network import sockets
from kdist.cluster.network.names import environment_with, without_proxy
from kdist.cluster.spec import Task
from kdist.errors import ClusterError, ConfigError

_JOB = "localhost"
#: The name of the CPU of this process in functions that use tasks.
OWN_DEVICE = f"/job:{_JOB}/replica:0/task:0/device:CPU:0"
#: What TensorFlow reads when it connects and while it is connected.
_ENVIRONMENT = {
    # Tasks that are connected all serve already: one that is gone is an error, and not something to wait for.
    "GRPC_FAIL_FAST": "true",
    # Calls are sent one by one and come back when they are done.
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False",
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": "True",
}
#: What holds while this process is connected; closing it restores what was there before.
_connected = ExitStack()
#: Where this process serves, once it was connected: its newest address, and the network interface.
_served: list[tuple[str, str | None]] = []


#: Held by whoever may connect this process.
_only_one = threading.Lock()


@contextmanager
def reserved() -> Iterator[None]:
    """Reserves the connection for a fit or an evaluation: a process has one, and a second would crash the first.

    Raises:
        ConfigError: the process is using it, in this thread or another.
    """
    if not _only_one.acquire(blocking=False):
        raise ConfigError(
            "this process is using a cluster already, and can use one at a time: wait for that fit or end its session, "
            "or give each a process of its own"
        )
    try:
        yield
    finally:
        _only_one.release()


def compute_device(task: Task) -> str:
    """The name of the device at which a connected task computes: its first GPU, or its CPU if it has none."""
    gpu = task.device.replace("CPU", "GPU")
    return gpu if any(device.name == gpu for device in tf.config.list_logical_devices("GPU")) else task.device


def connect(spec: tf.train.ClusterSpec, own_address: str, *, any_port: bool = False) -> None:
    """Makes the tasks of `spec`, which all serve already, devices of this process.

    Args:
        own_address: `host:port` of this process, as the tasks reach it; TensorFlow serves at the port from now on.
        any_port: whether another port would do: that of an earlier cluster.

    Raises:
        ClusterError: the port is in use.
        tf.errors.OpError: a task does not respond.
    """
    served = _server_for(own_address, any_port=any_port)
    if served is None:
        _check_port(own_address)
    else:
        own_address = served
    before = tf_compat.server_def()
    addresses = [own_address, *(address for job in spec.jobs for address in spec.job_tasks(job))]
    _connected.enter_context(environment_with(_ENVIRONMENT | without_proxy(addresses)))
    probe = tf.Variable(0, trainable=False)
    # A copy: the spec keeps what it returns.
    cluster = tf.train.ClusterDef()
    cluster.CopyFrom(spec.as_cluster_def())
    job = cluster.job.add()
    job.name = _JOB
    job.tasks[0] = own_address
    definition = tf.train.ServerDef(
        cluster=cluster,
        job_name=_JOB,
        task_index=0,
        protocol="grpc",
        default_session_config=tf_compat.session_config(),
    )
    _set_filters(definition)
    try:
        (tf_compat.set_server_def if served is None else tf_compat.update_server_def)(definition)
    except tf.errors.OpError:
        tf_compat.forget_server_def(None if served is None else before)
        _connected.close()
        raise
    _connected.enter_context(tf_compat.keep_unused_functions())
    if served is None:
        sockets.bind_port(int(own_address.rpartition(":")[2]))
        _served[:] = [(own_address, sockets.bound_to())]
    # Makes their devices known.
    tf.config.list_logical_devices()
    probe.assign(1)
    if int(probe) != 1:
        # Training would go on with other values than those of the program's variables.
        disconnect()
        raise ConfigError(
            "tf.config was changed after TensorFlow's first operation and before kdist was used, so connecting to the "
            "tasks has replaced the devices of this process, with all variables on them; change tf.config at the top "
            "of the program"
        )


def reconnect(spec: tf.train.ClusterSpec, without: Collection[Task]) -> None:
    """Connects this process to all tasks of `spec` except some; it is already connected to others.

    A task that was left out before counts as a new process; the functions that were traced before are sent to it. Every
    task has to respond: TensorFlow would wait for a stopped one without a limit, and nothing else of this process would
    run in the meantime.

    Raises:
        tf.errors.OpError: a task does not serve, or has only just started to; then nothing changed.
    """
    before = tf_compat.server_def()
    definition = tf_compat.server_def()
    if before is None or definition is None:
        raise RuntimeError("used before connect()")
    _replace_jobs(definition, spec.as_cluster_def().job)
    for job in definition.cluster.job:
        for task in without:
            if task.job == job.name:
                del job.tasks[task.index]
    _set_filters(definition)
    try:
        tf_compat.update_server_def(definition)
    except tf.errors.OpError:
        tf_compat.forget_server_def(before)
        raise
    tf_compat.remove_unused_functions()


def disconnect() -> None:
    """Makes this process forget all tasks. Without it, a later `Model.fit` of plain Keras waits for them for ever."""
    tf_compat.forget_copies_for_tasks()
    with _connected:
        alone = tf_compat.server_def()
        if alone is None:
            return
        alone.ClearField("cluster_device_filters")
        _replace_jobs(alone, [])
        tf_compat.update_server_def(alone)


#: The jobs that each job sends tensors to, besides this process. Values move from server to server.
_PEERS = {"worker": ["ps"], "ps": ["worker", "ps"]}


def _set_filters(definition: tf.train.ServerDef) -> None:
    """Lets each task see those tasks only that it sends tensors to."""
    definition.ClearField("cluster_device_filters")
    for job in definition.cluster.job:
        if peers := _PEERS.get(job.name):
            filters = definition.cluster_device_filters.jobs.add(name=job.name).tasks
            for index in job.tasks:
                filters[index].device_filters[:] = [f"/job:{peer}" for peer in [*peers, _JOB]]


def _replace_jobs(definition: tf.train.ServerDef, jobs: Iterable[Any]) -> None:
    """Replaces all jobs but that of this process."""
    own = [job for job in definition.cluster.job if job.name == _JOB]
    del definition.cluster.job[:]
    definition.cluster.job.extend([*jobs, *own])


def _server_for(own_address: str, *, any_port: bool) -> str | None:
    """The address at which this process serves already, if that is where it is to serve."""
    if tf_compat.server_def() is None:
        return None
    for address, at in _served:
        (host, _, port), (own_host, _, own_port) = address.rpartition(":"), own_address.rpartition(":")
        if (host, at) == (own_host, sockets.bound_to()) and (any_port or port == own_port):
            return address
    return None


def _check_port(own_address: str) -> None:
    """Finds out that a port is in use before TensorFlow does, which would end the process."""
    port = int(own_address.rpartition(":")[2])
    try:
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("", port))
    except OSError:
        raise ClusterError(
            f"the chief cannot serve at {own_address}: the port is in use; give another cluster.chief_port, or null "
            "for any that is free (TensorFlow keeps a port until its process ends)"
        ) from None
