"""The hosts of a cluster, and the tasks of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kdist.cluster.spec import EVALUATOR, ClusterShape, Task
from kdist.errors import ConfigError

# A host name, an IPv4 address, or an IPv6 address in brackets; ssh would take what begins with a dash for an option.
_HOST = re.compile(r"(?:(?P<user>[\w][\w.-]*)@)?(?P<name>[\w][\w.-]*|\[[\da-fA-F:.]+\])(?::(?P<slots>\d+))?")
_FORM = "the form is host:slots, with commas between hosts, as h1:2,user@h2:2,[fd00::3]:1"
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """A machine that ssh reaches.

    Attributes:
        name: a host name or an IP address, without brackets.
        user: who logs in there; None as ssh has it.
        slots: how many tasks it takes.
    """

    name: str
    user: str | None = None
    slots: int = 1

    @property
    def login(self) -> str:
        """The destination, as ssh takes it."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def address(self, port: int, name: str | None = None) -> str:
        """`host:port`; `name` is the name for the other hosts, if that is not ssh's."""
        name = name or self.name
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Request:
    """The tasks to start, and the hosts.

    Attributes:
        joined_chief: `host:port` of the chief whose cluster the tasks join; None if they are a cluster of their own.
        command: of every task, without the interpreter.
        python, folder: the interpreter and the working directory of the tasks, on every host.
        ssh: the command to connect with.
        port: of the first task of a host, whose others follow; None for any free ports.
        connect_timeout: seconds within which every host must be ready.
        patience: seconds of silence after which a connection counts as lost.
        grace_secs: seconds for tasks to end when another one has failed.
    """

    hosts: tuple[Host, ...]
    shape: ClusterShape
    joined_chief: str | None
    command: tuple[str, ...]
    python: str
    folder: str
    ssh: tuple[str, ...]
    port: int | None
    connect_timeout: float
    patience: float
    grace_secs: float

    def name_of(self, task: Task) -> str:
        """The name of a task in the output; the index of one that joins is known to its chief alone."""
        return str(task) if self.joined_chief is None else f"{task.job}+{task.index + 1}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads `h1:2,user@h2:2,[fd00::3]:1`; a host without a number has one slot.

    Raises:
        ConfigError: another form, or a host that is named twice, or that is another machine on each of several hosts.
    """
    found: dict[str, Host] = {}
    for entry in text.split(","):
        match = _HOST.fullmatch(entry)
        if match is None:
            hint = ""
            if "%" in entry:
                hint = "; a scope, as %eth0, means nothing to other hosts"
            elif entry.count(":") > 1 and "[" not in entry:
                hint = "; an IPv6 address stands in brackets"
            raise ConfigError(f"-H {entry or repr(text)}: cannot be read: {_FORM}{hint}")
        slots = int(match["slots"] or 1)
        if not slots:
            raise ConfigError(f"-H {entry}: a host takes at least one task")
        host = Host(match["name"].strip("[]"), match["user"], slots)
        if host.name in found:
            raise ConfigError(f"-H {text}: {host} is named twice; add up its slots")
        found[host.name] = host
    if len(found) > 1 and (local := [name for name in _LOCAL if name in found]):
        raise ConfigError(f"-H {local[0]}: means a different machine on every host; give a name that all hosts resolve")
    return tuple(found.values())


def tasks_by_host(hosts: Sequence[Host], shape: ClusterShape) -> dict[Host, tuple[Task, ...]]:
    """The tasks of each host that has some: worker 0, the chief, first, then workers, and servers last.

    That is the order of ranks under Slurm. Hosts are filled one after another.

    Raises:
        ConfigError: there are fewer slots than tasks.
    """
    tasks = [task for job in ("worker", "ps") for task in shape.tasks if task.job == job]
    tasks += [EVALUATOR] * shape.has_evaluator
    if (slots := sum(host.slots for host in hosts)) < len(tasks):
        listed = ", ".join(map(str, tasks))
        raise ConfigError(f"-H has {slots} slots, and cluster={shape} has {len(tasks)} tasks: {listed}")
    assigned: dict[Host, tuple[Task, ...]] = {}
    for host in hosts:
        if tasks:
            assigned[host], tasks = tuple(tasks[: host.slots]), tasks[host.slots :]
    return assigned


def tf_configs(addresses: Mapping[Task, str]) -> dict[Task, str]:
    cluster: dict[str, list[str]] = {}
    for task, address in addresses.items():
        # An evaluator is not part of the cluster.
        if task != EVALUATOR:
            cluster.setdefault(task.job, []).append(address)
    return {
        task: json.dumps({"cluster": cluster, "task": {"type": task.job, "index": task.index}}) for task in addresses
    }
