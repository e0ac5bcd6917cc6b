"""Connecting this process to a cluster without breaking what it already holds.

TensorFlow's own `ParameterServerStrategy` connects in a way that breaks the user's process twice. It renames the job of
this process from `localhost` to `chief`, so that every variable made before is at an address that is gone. And it sends
a session config that differs from the one this process runs with; TensorFlow then replaces the local devices, and
assigning to a variable made before silently does nothing. Connecting under the old name, with the very config that the
process runs with, keeps the devices and everything on them.

The private names of TensorFlow's that this takes were read in 2.20 and 2.21.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import tensorflow as tf
from tensorflow.core.protobuf import cluster_pb2, config_pb2, tensorflow_server_pb2
from tensorflow.python.eager import context

from kdist.cluster.spec import Task
from kdist.errors import ClusterError, ConfigError
from kdist.warn import warn

_JOB = "localhost"
_DETERMINISTIC_FLAG = "_ZN6google8protobuf2io17CodedOutputStream36default_serialization_deterministic_E"


def connect(spec: tf.train.ClusterSpec, own_address: str) -> None:
    """Makes the tasks of `spec`, which all serve already, devices of this process.

    Args:
        own_address: `host:port` of this process, as the tasks reach it; TensorFlow serves at the port from now on.

    Raises:
        ConfigError: it is connected to other tasks.
        ClusterError: the port is in use.
        tf.errors.OpError: a task does not answer.
    """
    server_def = context.context().get_server_def()
    if server_def is not None and len(server_def.cluster.job) > 1:
        # TensorFlow would crash when the first cluster is used again.
        raise ConfigError("this process is using a cluster already; end its session before starting another one")
    _check_port(own_address)
    probe = tf.Variable(0, trainable=False)
    # The spec keeps what it gives away.
    cluster = cluster_pb2.ClusterDef()
    cluster.CopyFrom(spec.as_cluster_def())
    job = cluster.job.add()
    job.name = _JOB
    job.tasks[0] = own_address
    filters = tf.config.experimental.ClusterDeviceFilters()
    for this_job, other_job in (("worker", "ps"), ("ps", "worker")):
        for index in range(spec.num_tasks(this_job)):
            filters.set_device_filters(this_job, index, [f"/job:{other_job}", f"/job:{_JOB}"])
    server_def = tensorflow_server_pb2.ServerDef(
        cluster=cluster,
        job_name=_JOB,
        task_index=0,
        protocol="grpc",
        default_session_config=_config_of_this_process(),
        cluster_device_filters=filters._as_cluster_device_filters(),
    )
    try:
        with _deterministic_serialization():
            context.set_server_def(server_def)
    except tf.errors.OpError:
        context.context()._server_def = None
        raise
    context.ensure_initialized()
    probe.assign(1)
    if int(probe) != 1:
        warn(
            "connecting replaced TensorFlow's local devices; assigning to variables made before has no effect "
            "any more in this process (make models and variables after fit instead)"
        )


def reconnect(spec: tf.train.ClusterSpec, without: Collection[Task]) -> None:
    """Makes all tasks of `spec` but some devices of this process, which is connected to some of them already.

    A task that was left out and is connected again is taken for a new process, which knows nothing. Functions that
    were traced before are known to it afterwards. Every task has to answer: one that is stopped would be waited for
    without a bound, and nothing else of this process would run meanwhile.

    Raises:
        tf.errors.OpError: a task does not serve, or has only just begun to; then nothing changed.
    """
    server_def = _present_server_def()
    own = [job for job in server_def.cluster.job if job.name == _JOB]
    del server_def.cluster.job[:]
    server_def.cluster.job.extend([*spec.as_cluster_def().job, *own])
    for job in server_def.cluster.job:
        for task in without:
            if task.job == job.name:
                del job.tasks[task.index]
    before = context.context().get_server_def()
    try:
        _update(server_def)
    except tf.errors.OpError:
        context.context()._server_def = before
        raise


def disconnect() -> None:
    """Makes this process forget all tasks. Without it, a later `Model.fit` of plain Keras waits for them for ever."""
    if context.context().get_server_def() is None:
        return
    alone = _present_server_def()
    alone.ClearField("cluster_device_filters")
    own = [job for job in alone.cluster.job if job.name == _JOB]
    del alone.cluster.job[:]
    alone.cluster.job.extend(own)
    _update(alone)


# What TensorFlow's own Python code takes.
_KEEP_ALIVE_SECS = 600


def _update(server_def: tensorflow_server_pb2.ServerDef) -> None:
    """`context.update_server_def`, but lets other threads run meanwhile.

    TensorFlow holds Python's lock in it. It may wait there for a host that fell silent, and the threads that would end
    the wait are Python's.

    Raises:
        tf.errors.OpError: as TensorFlow's.
    """
    library = _tensorflow_library()
    own = context.context()
    if library is None:
        context.update_server_def(server_def)
        return
    serialized = server_def.SerializeToString()
    status = ctypes.c_void_p(library.TF_NewStatus())
    try:
        library.TFE_ContextUpdateServerDef(
            _pointer_in(own._handle), _KEEP_ALIVE_SECS, serialized, ctypes.c_size_t(len(serialized)), status
        )
        if code := library.TF_GetCode(status):
            message = library.TF_Message(status).decode(errors="replace")
            raise tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)
    finally:
        library.TF_DeleteStatus(status)
    own._server_def = server_def
    own._initialize_logical_devices()
    own._clear_caches()


@functools.cache
def _tensorflow_library() -> ctypes.CDLL | None:
    """TensorFlow's C functions, which ctypes calls without Python's lock; None where they are not to be had."""
    for path in Path(tf.sysconfig.get_lib()).glob("libtensorflow_cc.*"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            library.TF_NewStatus.restype = ctypes.c_void_p
            library.TF_Message.restype = ctypes.c_char_p
            _ = library.TFE_ContextUpdateServerDef, library.TF_GetCode, library.TF_DeleteStatus
            return library
    return None


def _pointer_in(capsule: object) -> ctypes.c_void_p:
    """What a capsule of Python's holds."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)))


def _check_port(own_address: str) -> None:
    """Finds out that a port is in use before TensorFlow does, which ends the process then."""
    port = int(own_address.rpartition(":")[2])
    try:
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("", port))
    except OSError:
        raise ClusterError(
            f"the chief cannot serve at {own_address}: the port is in use; give another cluster.chief_port, or null "
            "for any that is free (TensorFlow keeps a port until its process ends, also for a second fit)"
        ) from None


def _present_server_def() -> tensorflow_server_pb2.ServerDef:
    server_def = tensorflow_server_pb2.ServerDef()
    server_def.CopyFrom(context.context().get_server_def())
    return server_def


def _config_of_this_process() -> config_pb2.ConfigProto:
    config = context.context().config
    # TensorFlow sets this when it makes its context, and does not tell Python.
    config.experimental.disable_optimize_for_static_graph = True
    return config


@contextmanager
def _deterministic_serialization() -> Iterator[None]:
    """Lets protobuf write maps in a fixed order meanwhile.

    TensorFlow compares the two configs as serialized bytes, and the order of a map's entries is random without it.
    """
    library = next(Path(tf.sysconfig.get_lib()).glob("libtensorflow_framework.*"), None)
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _DETERMINISTIC_FLAG)
    except (OSError, ValueError):
        # Not on this platform: the comparison may fail then, and `connect` says so.
        yield
        return
    before = flag.value
    flag.value = True
    try:
        yield
    finally:
        flag.value = before
