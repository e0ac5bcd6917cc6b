"""What this process is in a cluster whose tasks are started one by one: from the config, or from TF_CONFIG."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdist.cluster.spec import CHIEF, ClusterShape, ClusterSpec, Membership, Task
from kdist.errors import ConfigError

if TYPE_CHECKING:
    from kdist.schema import ClusterConfig

_ADDRESS = re.compile(r"(\S+):(\d{1,5})")
_JOBS = ("ps", "worker", "chief")
_TF_CONFIG_FORM = '{"cluster": {"ps": ["host:port"], "worker": [...]}, "task": {"type": "worker", "index": 0}}'


def membership_of(config: ClusterConfig, environment: Mapping[str, str]) -> Membership | None:
    """The membership that `cluster=hosts` or `cluster=tf_config` describes; None for any other cluster.

    Raises:
        ConfigError: an address, job or index that cannot be, or a TF_CONFIG that is not one.
    """
    if config.shape == "hosts":
        return _of_hosts(config)
    if config.shape == "tf_config":
        return _of_tf_config(environment.get("TF_CONFIG"))
    for key in ("ps", "worker", "chief", "job", "task"):
        if getattr(config, key) not in (None, []):
            raise ConfigError(f"cluster.{key}: is for cluster=hosts, not for cluster={config.shape}")
    return None


def shape_of(config: ClusterConfig, membership: Membership | None) -> ClusterShape:
    """How many tasks the cluster has.

    Raises:
        ConfigError: see `ClusterShape.parse`.
    """
    return membership.spec.shape if membership is not None else ClusterShape.parse(config.shape)


def common_seed(membership: Membership) -> int:
    """A seed that all tasks of a cluster agree on without a word."""
    return zlib.crc32(repr(membership.spec).encode())


def _of_hosts(config: ClusterConfig) -> Membership:
    job = config.job
    if job not in _JOBS:
        given = "is not given" if job is None else f"={job}"
        raise ConfigError(f"cluster.job{given}: with cluster=hosts say what this process is: {', '.join(_JOBS)}")
    if config.task is not None and config.task < 0:
        raise ConfigError(f"cluster.task={config.task}: must be a whole number, at least 0")
    addresses = {"ps": config.ps, "worker": config.worker, "chief": [config.chief] if config.chief else []}
    return _membership(addresses, job, config.task or 0, key="cluster.")


def _of_tf_config(text: str | None) -> Membership:
    if not text:
        raise ConfigError(f"cluster=tf_config: TF_CONFIG is not set; it must be {_TF_CONFIG_FORM}")
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG: is not JSON ({error}); it must be {_TF_CONFIG_FORM}") from None
    for part, kind in (("cluster", dict), ("task", dict)):
        if not isinstance(given, dict) or not isinstance(given.get(part), kind):
            raise ConfigError(f"TF_CONFIG: has no {part}; it must be {_TF_CONFIG_FORM}")
    cluster, task = given["cluster"], given["task"]
    if "type" not in task:
        raise ConfigError(f"TF_CONFIG: task has no type; it must be {_TF_CONFIG_FORM}")
    try:
        index = int(task.get("index", 0))
    except (TypeError, ValueError):
        raise ConfigError(f"TF_CONFIG: task.index={task['index']}: must be a whole number, at least 0") from None
    # "master" is what TF1 called the chief.
    renamed = {"chief" if job == "master" else job: hosts for job, hosts in cluster.items()}
    job = "chief" if task["type"] == "master" else task["type"]
    if unknown := sorted(set(renamed) - {*_JOBS, "evaluator"}):
        raise ConfigError(f"TF_CONFIG: cluster has the jobs {', '.join(unknown)}; kdist knows {', '.join(_JOBS)}")
    for name, hosts in renamed.items():
        if not isinstance(hosts, list):
            raise ConfigError(f"TF_CONFIG: cluster.{name} must be a list of addresses, host:port")
    if job == "evaluator":
        # No evaluator is part of a cluster; it looks at checkpoints only.
        return Membership(_spec(renamed, "TF_CONFIG: cluster."), Task("evaluator", index))
    if not renamed.get("ps") and renamed.get("chief"):
        # Without servers the chief trains as well, as the first of the workers.
        index += job == "worker"
        renamed, job = {"worker": [*renamed["chief"], *renamed.get("worker", [])]}, "worker"
    return _membership(renamed, job, index, key="TF_CONFIG: cluster.")


def _membership(addresses: Mapping[str, Sequence[str]], job: str, index: int, *, key: str) -> Membership:
    if job not in _JOBS:
        raise ConfigError(f"{key}: there is no job {job}; a task is one of {', '.join(_JOBS)}")
    spec = _spec(addresses, key)
    have = {"ps": spec.ps, "worker": spec.worker, "chief": (spec.chief,) if spec.chief else ()}[job]
    if index >= len(have):
        what = f"{len(have)} such task{'' if len(have) == 1 else 's'}" if have else "no such task"
        raise ConfigError(f"{key}task: this process is {job}:{index}, and {key}{job} has {what}")
    return Membership(spec, CHIEF if job == "chief" else Task(job, index))


def _spec(addresses: Mapping[str, Sequence[str]], key: str) -> ClusterSpec:
    seen: dict[str, str] = {}
    for job in _JOBS:
        for index, address in enumerate(addresses.get(job, [])):
            match = _ADDRESS.fullmatch(str(address))
            if match is None or not 0 < int(match[2]) < 65536:
                raise ConfigError(f"{key}{job}: {address}: is no address; the form is host:port")
            task = str(CHIEF if job == "chief" else Task(job, index))
            if address in seen:
                raise ConfigError(f"{key}{job}: {task} and {seen[address]} are both at {address}; each needs its own")
            seen[address] = task
    if not addresses.get("worker"):
        raise ConfigError(f"{key}worker: there is no worker")
    chiefs: Any = addresses.get("chief") or [None]
    if len(chiefs) > 1:
        raise ConfigError(f"{key}chief: there is one chief, not {len(chiefs)}")
    return ClusterSpec(tuple(addresses.get("ps", ())), tuple(addresses["worker"]), chiefs[0])
