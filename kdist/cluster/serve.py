"""A parameter server or worker that was started by hand: serves until its chief is done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kdist.cluster.process import visible_devices
from kdist.cluster.spec import Membership
from kdist.errors import ClusterError
from kdist.quick_import import quick_import
from kdist.version import __version__

if TYPE_CHECKING:
    from kdist.schema import ClusterConfig
    from kdist.signals import TaskSignals


def serve_until_done(
    membership: Membership, config: ClusterConfig, signals: TaskSignals, *, log_device_placement: bool = False
) -> None:
    """Serves as the task that this process is.

    Args:
        signals: told when the chief may need this task.

    Raises:
        ClusterError: the address is in use, or the chief never came or is gone.
    """
    task, spec = membership.task, membership.spec
    visible = visible_devices(task, config.devices)
    if visible is not None or task.job == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""
    with quick_import(keras=False):
        import tensorflow as tf

    from kdist.cluster.notice import Chief
    from kdist.cluster.port_probe import accepts_connections
    from kdist.cluster.tcp_timeouts import TcpTimeouts

    address = spec.address(task)
    if accepts_connections(address):
        raise ClusterError(f"{task} cannot serve at {address}: the address is in use")
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(spec.jobs),
            job_name=task.job,
            task_index=task.index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(log_device_placement=log_device_placement),
        )
    except tf.errors.OpError as error:
        raise ClusterError(f"{task} cannot serve at {address}: {error.message}") from error
    chief = Chief(spec, task, config.patience)
    print(f"kdist {__version__} | {task} of {spec.shape} | at {address}, chief {chief}", flush=True)
    timeouts = TcpTimeouts(spec.addresses.values(), [spec.port(task)], config.patience)
    timeouts.start()
    try:
        chief.wait_for_it(config.start_timeout)
        signals.begin_to_serve()
        chief.wait_until_done()
    finally:
        timeouts.stop()
        chief.stop()
    print(f"done  | {task} | the chief is done", flush=True)
    del server
