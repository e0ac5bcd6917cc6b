"""The role of this process in its cluster: its tasks are started by others, one by one, or by this process.

`cluster=hosts` describes the tasks in the config, `cluster=tf_config` in the environment variable TF_CONFIG. A shape,
as `2ps3w`, says how many tasks there are; who starts them is found out: if a Slurm step or a TF_CONFIG has the tasks of
the shape, this process is one of them. A process that is alone starts them itself. Anything else is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdist.cluster import slurm, tf_config
from kdist.cluster.address_check import check_private
from kdist.cluster.membership import ROLES, Keys, membership_at
from kdist.cluster.spec import ClusterShape, Membership
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from kdist.config.schema import ClusterConfig

_HOSTS = Keys("cluster.", "cluster.job", "cluster.task")
# How launchers of MPI tell a process how many of its kind they started.
_MPI_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


def with_given(config: ClusterConfig, **given: Any) -> ClusterConfig:
    """The config, changed by what was given in addition; None is not given."""
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def membership_of(config: ClusterConfig, environment: Mapping[str, str]) -> Membership | None:
    """What this process is, if others start the tasks of its cluster; None if it starts them itself.

    Raises:
        ConfigError: an invalid address, job or index, an invalid TF_CONFIG, another number of tasks than the shape has,
            or a public address.
    """
    membership = _described(config, environment)
    if membership is not None:
        if config.isolate == "must":
            raise ConfigError(
                f"cluster.isolate=must: is for tasks that kdist starts; those of cluster={config.shape} need a network"
            )
        if not config.allow_unprotected_network:
            check_private(membership.spec.addresses)
    return membership


def _described(config: ClusterConfig, environment: Mapping[str, str]) -> Membership | None:
    if config.shape in ("hosts", "tf_config") and config.started_by != "auto":
        raise ConfigError(f"cluster.started_by={config.started_by}: is for NpsMw and Mw, not for {config.shape}")
    if config.shape == "hosts":
        return _of_hosts(config)
    for key in ("ps", "worker", "chief", "job", "task"):
        if getattr(config, key) not in (None, []):
            raise ConfigError(f"cluster.{key}: is for cluster=hosts, not for cluster={config.shape}")
    if config.shape == "tf_config":
        return tf_config.membership_in(environment.get("TF_CONFIG"), "cluster=tf_config")
    membership = _of_shape(ClusterShape.parse(config.shape), config.started_by, environment)
    if membership is None and config.chief_port is not None:
        raise ConfigError(f"cluster.chief_port: is for tasks that others start; kdist starts those of {config.shape}")
    return membership


def _of_hosts(config: ClusterConfig) -> Membership:
    if config.job is None:
        raise ConfigError(f"cluster.job is not given: with cluster=hosts say what this process is: {', '.join(ROLES)}")
    chief = [config.chief] if config.chief else []
    addresses = {"ps": config.ps, "worker": config.worker, "chief": chief}
    return membership_at(addresses, config.job, 0 if config.task is None else config.task, _HOSTS)


def _of_shape(shape: ClusterShape, started_by: str, environment: Mapping[str, str]) -> Membership | None:
    """What this process is among the tasks of a shape; None if it starts them itself."""
    if shape.is_local:
        if started_by in ("slurm", "tf_config"):
            raise ConfigError(f"cluster.started_by={started_by}: cluster={shape} is one process; give NpsMw or Mw")
        return None
    if started_by == "kdist":
        return None
    if started_by == "tf_config":
        return _of_tf_config(shape, environment, "cluster.started_by=tf_config")
    if started_by == "slurm":
        return slurm.membership_in(shape, environment)
    # Somebody has set it for this very process; a launcher sets its variables for every process.
    if environment.get("TF_CONFIG") and not _is_alone(environment):
        return _of_tf_config(shape, environment, "cluster.started_by=auto")
    _refuse_copies_of_mpi(shape, environment)
    return slurm.membership_in(shape, environment) if slurm.num_tasks(environment) > 1 else None


def _of_tf_config(shape: ClusterShape, environment: Mapping[str, str], asked_by: str) -> Membership:
    membership = tf_config.membership_in(environment.get("TF_CONFIG"), asked_by)
    found = membership.spec.shape
    # An evaluator is not part of the cluster.
    if (found.num_ps, found.num_workers) != (shape.num_ps, shape.num_workers):
        raise ConfigError(
            f"cluster={shape}: TF_CONFIG has the tasks of {found}\n"
            f"  either make them the same, as cluster={found}\n"
            "  or ignore TF_CONFIG by cluster.started_by=kdist: kdist starts the tasks itself, on this machine"
        )
    return membership


def _is_alone(environment: Mapping[str, str]) -> bool:
    """Whether TF_CONFIG describes one task, this process."""
    try:
        membership = tf_config.membership_in(environment.get("TF_CONFIG"), "cluster.started_by=auto")
    except ConfigError as error:
        raise ConfigError(f"{error}\n  cluster.started_by=kdist ignores it") from None
    return len(membership.spec.addresses) == 1 and not membership.evaluates


def _refuse_copies_of_mpi(shape: ClusterShape, environment: Mapping[str, str]) -> None:
    """Refuses to start a cluster in each of several processes that a launcher of MPI started for the same command."""
    for variable, launcher in _MPI_LAUNCHERS.items():
        count = environment.get(variable, "")
        # Slurm sets PMI_SIZE for its own tasks, too.
        if count.isdecimal() and int(count) > 1 and int(count) != slurm.num_tasks(environment):
            raise ConfigError(
                f"cluster={shape}: {launcher} started this command {count} times ({variable}), and each would start a "
                "cluster of its own\n"
                f"  either start it once ({launcher} -n 1): kdist starts the tasks itself, on one machine\n"
                "  or give each process its task: TF_CONFIG, or cluster=hosts with cluster.job and cluster.task"
            )


def shape_of(config: ClusterConfig, membership: Membership | None) -> ClusterShape:
    """How many tasks the cluster has.

    Raises:
        ConfigError: see `ClusterShape.parse`.
    """
    return membership.spec.shape if membership is not None else ClusterShape.parse(config.shape)


def common_seed(membership: Membership) -> int:
    """A seed that is the same on every task, derived from the cluster spec without communication."""
    return zlib.crc32(repr(membership.spec).encode())
