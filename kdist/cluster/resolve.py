"""The role of this process in its cluster: its tasks are started by others, one by one, or by this process.

`cluster=hosts` describes the tasks in the config, `cluster=tf_config` in the environment variable TF_CONFIG. A shape,
as `2ps3w`, says how many tasks there are; who starts them is found out: if a Slurm step or a TF_CONFIG has the tasks of
the shape, this process is one of them. A process that is alone starts them itself. Anything else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdist._compat.imports import quick_import
from kdist.cluster import slurm
from kdist.cluster.network.names import check_private, own_address
from kdist.cluster.spec import CHIEF, EVALUATOR, ClusterShape, ClusterSpec, Membership, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError

#: In the run dir of a chief that trains: a folder that is open to its user alone, and a file in it with its address.
CONTROL_FOLDER, CHIEF_FILE = ".resize", "chief"
# A host name, an IPv4 address, or an IPv6 address in brackets.
_ADDRESS = re.compile(r"(?:[^\s,/:\[\]]+|\[[\da-fA-F:.]+\]):([1-9]\d{0,4})")
_JOBS = ("ps", "worker", "chief")
ROLES = (*_JOBS, EVALUATOR.job)
_TF_CONFIG_FORM = '{"cluster": {"ps": ["host:port"], "worker": [...]}, "task": {"type": "worker", "index": 0}}'
# How launchers of MPI tell a process how many of its kind they started.
_MPI_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
# The names of the addresses of a job, of the job of a process and of its index, in each source.
_HOSTS = ("cluster.", "cluster.job", "cluster.task")
_TF_CONFIG = ("TF_CONFIG: cluster.", "TF_CONFIG: task.type", "TF_CONFIG: task.index")


def with_given(config: ClusterConfig, **given: Any) -> ClusterConfig:
    """Changes a config by the values that were given in addition; None is not given."""
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def membership_of(config: ClusterConfig, environment: Mapping[str, str]) -> Membership | None:
    """The role of this process, if others start the tasks of its cluster; None if it starts them itself.

    Raises `ConfigError` for what is wrong in the config or TF_CONFIG, and for public addresses.
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
        if config.job is None:
            raise ConfigError(
                f"cluster.job is not given: with cluster=hosts say what this process is: {', '.join(ROLES)}"
            )
        if config.job in ("ps", "worker") and not config.ps and not config.worker and (config.chief or config.join):
            return _joined(config)
        if config.join is not None:
            raise ConfigError("cluster.join: is for a worker or server that joins, without lists of addresses")
        addresses = {"ps": config.ps, "worker": config.worker, "chief": [config.chief] if config.chief else []}
        return membership_at(addresses, config.job, 0 if config.task is None else config.task, _HOSTS)
    for key in ("ps", "worker", "chief", "job", "task", "join"):
        if getattr(config, key) not in (None, []):
            raise ConfigError(f"cluster.{key}: is for cluster=hosts, not for cluster={config.shape}")
    if config.shape == "tf_config":
        return membership_in_tf_config(environment.get("TF_CONFIG"), "cluster=tf_config")
    membership = _of_shape(ClusterShape.parse(config.shape), config.started_by, environment)
    if membership is None and config.chief_port is not None:
        raise ConfigError(f"cluster.chief_port: is for tasks that others start; kdist starts those of {config.shape}")
    return membership


def _joined(config: ClusterConfig) -> Membership:
    """The membership in a cluster that is training, whose chief gives this process a place."""
    if config.task is not None:
        raise ConfigError(f"cluster.task={config.task}: the chief gives a {config.job} that joins its index")
    if config.chief and config.join:
        raise ConfigError(f"cluster.join={config.join}: give either this or cluster.chief")
    if config.chief is None:
        chief = chief_at(str(config.join))
    elif _ADDRESS.fullmatch(chief := config.chief) is None:
        raise ConfigError(f"cluster.chief: {chief}: is no address; the form is host:port")
    with quick_import(keras=False):
        # Imports TensorFlow.
        from kdist.cluster.processes.chief_board import ask_for_place

    own = own_address(chief, config.start_timeout)
    return Membership(*ask_for_place(chief, str(config.job), own, config.start_timeout), has_joined=True)


def chief_at(join: str, key: str = "cluster.join=") -> str:
    """The address of the chief that trains in a run dir; an address is taken as it is."""
    if _ADDRESS.fullmatch(join):
        return join
    try:
        return (Path(join) / CONTROL_FOLDER / CHIEF_FILE).read_text(encoding="utf-8")
    except OSError as error:
        why = (
            "nothing trains there whose tasks others start" if isinstance(error, FileNotFoundError) else error.strerror
        )
        raise ConfigError(f"{key}{join}: {why}") from None


def _of_shape(shape: ClusterShape, started_by: str, environment: Mapping[str, str]) -> Membership | None:
    """The role of this process among the tasks of a shape; None if it starts them itself."""
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
    membership = membership_in_tf_config(environment.get("TF_CONFIG"), asked_by)
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
    try:
        membership = membership_in_tf_config(environment.get("TF_CONFIG"), "cluster.started_by=auto")
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
    return membership.spec.shape if membership is not None else ClusterShape.parse(config.shape)


def membership_in_tf_config(text: str | None, asked_by: str) -> Membership:
    """The membership in `text`, the value of TF_CONFIG; `asked_by` is the key that asks for it, and its value."""
    form = f"it must be {_TF_CONFIG_FORM}"
    if not text:
        raise ConfigError(f"{asked_by}: TF_CONFIG is not set; {form}")
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG: is not JSON ({error}); {form}") from None
    for part in ("cluster", "task"):
        if not isinstance(given, dict) or not isinstance(given.get(part), dict):
            raise ConfigError(f"TF_CONFIG: has no {part}; {form}")
    cluster, task = given["cluster"], given["task"]
    if "type" not in task:
        raise ConfigError(f"TF_CONFIG: task has no type; {form}")
    if "master" in cluster and "chief" in cluster:
        raise ConfigError("TF_CONFIG: cluster has a master and a chief, which are the same job")
    # "master" is what TF1 called the chief.
    cluster = {"chief" if job == "master" else job: hosts for job, hosts in cluster.items()}
    if unknown := sorted(set(cluster) - set(ROLES)):
        raise ConfigError(f"TF_CONFIG: cluster has the jobs {', '.join(unknown)}; kdist knows {', '.join(ROLES)}")
    for job, hosts in cluster.items():
        if not isinstance(hosts, list):
            raise ConfigError(f"TF_CONFIG: cluster.{job} must be a list of addresses, host:port")
    index = task.get("index", 0)
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    job = "chief" if task["type"] == "master" else task["type"]
    return membership_at(cluster, job, index, _TF_CONFIG)


def membership_at(
    addresses: Mapping[str, Sequence[str]], job: Any, index: Any, keys: tuple[str, str, str]
) -> Membership:
    """The membership of task `index` of `job` in the cluster at `addresses`, `host:port` by job; errors name `keys`."""
    cluster_key, job_key, index_key = keys
    if job not in ROLES:
        raise ConfigError(f"{job_key}={job}: there is no such job; a task is one of {', '.join(ROLES)}")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ConfigError(f"{index_key}={index}: must be a whole number, at least 0")
    have = len(addresses.get(job, ()))
    spec = _spec(addresses, cluster_key)
    if job == EVALUATOR.job:
        return Membership(spec, Task(EVALUATOR.job, index))
    if index >= have:
        what = f"{have} such task{'' if have == 1 else 's'}" if have else "no such task"
        raise ConfigError(f"{index_key}: this process is {job}:{index}, and {cluster_key}{job} has {what}")
    if not spec.ps and addresses.get("chief"):
        # Without servers the chief trains as well: `_spec` has made it the first of the workers.
        return Membership(spec, Task("worker", index if job == "chief" else index + 1))
    return Membership(spec, CHIEF if job == "chief" else Task(job, index))


def _spec(addresses: Mapping[str, Sequence[str]], key: str) -> ClusterSpec:
    seen: dict[str, str] = {}
    for job in _JOBS:
        for index, address in enumerate(addresses.get(job, ())):
            match = _ADDRESS.fullmatch(str(address))
            if match is None or int(match[1]) > 65535:
                raise ConfigError(f"{key}{job}: {address}: is no address; the form is host:port")
            task = str(CHIEF if job == "chief" else Task(job, index))
            if address in seen:
                raise ConfigError(f"{key}{job}: {task} and {seen[address]} are both at {address}; each needs its own")
            seen[address] = task
    ps, workers, chiefs = (tuple(addresses.get(job, ())) for job in _JOBS)
    if len(chiefs) > 1:
        raise ConfigError(f"{key}chief: there is one chief, not {len(chiefs)}")
    if not ps:
        workers, chiefs = (*chiefs, *workers), ()
    if not workers:
        raise ConfigError(f"{key}worker: there is no worker")
    return ClusterSpec(ps, workers, chiefs[0] if chiefs else None)
