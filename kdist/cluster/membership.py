"""What a process is among tasks that others start, from the addresses of all of them, with every check of these."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdist.cluster.spec import CHIEF, EVALUATOR, ClusterSpec, Membership, Task
from kdist.errors import ConfigError

# A host name, an IPv4 address, or an IPv6 address in brackets.
_ADDRESS = re.compile(r"(?:[^\s,/:\[\]]+|\[[\da-fA-F:.]+\]):([1-9]\d{0,4})")
_JOBS = ("ps", "worker", "chief")
ROLES = (*_JOBS, EVALUATOR.job)


@dataclass(frozen=True)
class Keys:
    """The names of the parts of a description in its source."""

    cluster: str
    job: str
    index: str


def membership_at(addresses: Mapping[str, Sequence[str]], job: Any, index: Any, keys: Keys) -> Membership:
    """The membership of task `index` of `job` in the cluster at `addresses`, `host:port` by job.

    Raises:
        ConfigError: names the part of the description that is wrong, by `keys`.
    """
    if job not in ROLES:
        raise ConfigError(f"{keys.job}={job}: there is no such job; a task is one of {', '.join(ROLES)}")
    _check_index(index, keys)
    have = len(addresses.get(job, ()))
    spec = _spec(addresses, keys)
    if job == EVALUATOR.job:
        return Membership(spec, Task(EVALUATOR.job, index))
    if index >= have:
        what = f"{have} such task{'' if have == 1 else 's'}" if have else "no such task"
        raise ConfigError(f"{keys.index}: this process is {job}:{index}, and {keys.cluster}{job} has {what}")
    if not spec.ps and addresses.get("chief"):
        # Without servers the chief trains as well: `_spec` has made it the first of the workers.
        return Membership(spec, Task("worker", index if job == "chief" else index + 1))
    return Membership(spec, CHIEF if job == "chief" else Task(job, index))


def _check_index(index: Any, keys: Keys) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ConfigError(f"{keys.index}={index}: must be a whole number, at least 0")


def _spec(addresses: Mapping[str, Sequence[str]], keys: Keys) -> ClusterSpec:
    seen: dict[str, str] = {}
    for job in _JOBS:
        for index, address in enumerate(addresses.get(job, ())):
            match = _ADDRESS.fullmatch(str(address))
            if match is None or int(match[1]) > 65535:
                raise ConfigError(f"{keys.cluster}{job}: {address}: is no address; the form is host:port")
            task = str(CHIEF if job == "chief" else Task(job, index))
            if address in seen:
                raise ConfigError(
                    f"{keys.cluster}{job}: {task} and {seen[address]} are both at {address}; each needs its own"
                )
            seen[address] = task
    ps, workers, chiefs = (tuple(addresses.get(job, ())) for job in _JOBS)
    if len(chiefs) > 1:
        raise ConfigError(f"{keys.cluster}chief: there is one chief, not {len(chiefs)}")
    if not ps:
        workers, chiefs = (*chiefs, *workers), ()
    if not workers:
        raise ConfigError(f"{keys.cluster}worker: there is no worker")
    return ClusterSpec(ps, workers, chiefs[0] if chiefs else None)
