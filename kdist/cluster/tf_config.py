"""The membership that the environment variable TF_CONFIG describes, as TensorFlow's own programs read it."""

from __future__ import annotations

import json

from kdist.cluster.membership import ROLES, Keys, membership_at
from kdist.cluster.spec import Membership
from kdist.errors import ConfigError

_FORM = '{"cluster": {"ps": ["host:port"], "worker": [...]}, "task": {"type": "worker", "index": 0}}'
_KEYS = Keys("TF_CONFIG: cluster.", "TF_CONFIG: task.type", "TF_CONFIG: task.index")


def membership_in(text: str | None, asked_by: str) -> Membership:
    """The membership that `text`, the value of TF_CONFIG, describes.

    Args:
        asked_by: the key that asks for it, and its value.

    Raises:
        ConfigError: it is not set, or not of its form.
    """
    if not text:
        raise ConfigError(f"{asked_by}: TF_CONFIG is not set; it must be {_FORM}")
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"TF_CONFIG: is not JSON ({error}); it must be {_FORM}") from None
    for part in ("cluster", "task"):
        if not isinstance(given, dict) or not isinstance(given.get(part), dict):
            raise ConfigError(f"TF_CONFIG: has no {part}; it must be {_FORM}")
    cluster, task = given["cluster"], given["task"]
    if "type" not in task:
        raise ConfigError(f"TF_CONFIG: task has no type; it must be {_FORM}")
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
    return membership_at(cluster, job, index, _KEYS)
