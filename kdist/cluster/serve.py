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


def serve_until_done(membership: Membership, config: ClusterConfig, *, log_device_placement: bool = False) -> None:
    """Serves as the task that this process is.

    Raises:
        ClusterError: the address is in use, or the chief never came or is gone.
    """
    task, spec = membership.task, membership.spec
    visible = visible_devices(task, config.devices)
    if visible is not None or task.job == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible or ""
    with quick_import(keras=False):
        import tensorflow as tf

    from kdist.cluster.notice import chief_server, wait_for_chief
    from kdist.cluster.rendezvous import accepts_connections

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
    chief_address, chief = chief_server(spec)
    print(f"kdist {__version__} | {task} of {spec.shape} | at {address}, chief {chief} at {chief_address}", flush=True)
    wait_for_chief(spec, task, config.start_timeout)
    print(f"done  | {task} | the chief is done", flush=True)
    del server
