"""The role of a process in a cluster of the tasks of a Slurm step, from the variables that Slurm sets.

Rank 0 is worker 0 and the chief. The other workers follow, then the parameter servers; an evaluator is the last one.
TensorFlow's own `SlurmClusterResolver` needs GPUs on every node, and takes every distribution of tasks for `block`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import product

from kdist.cluster.spec import EVALUATOR, ClusterShape, ClusterSpec, Membership
from kdist.errors import ConfigError

# Below the ports that Linux gives to connections, from 32768 on, so that none of those is in the way.
_FIRST_PORT, _NUM_RANGES, _PORTS_PER_RANGE = 20000, 199, 64
# A name, which may have ranges in brackets, ends at a comma outside of them.
_NAME = r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def num_tasks(environment: Mapping[str, str]) -> int:
    """The number of tasks of the Slurm step of this process; 0 if it is not part of one."""
    count = environment.get("SLURM_STEP_NUM_TASKS", "")
    return int(count) if count.isdecimal() else 0


def membership_in(shape: ClusterShape, environment: Mapping[str, str]) -> Membership:
    """The role of this process in its step; raises `ConfigError` if the step has other tasks, or does not say where."""
    if not (found := num_tasks(environment)):
        raise ConfigError("cluster.started_by=slurm: SLURM_STEP_NUM_TASKS is not set; start this command by srun")
    needed = len(shape.tasks) + shape.has_evaluator
    if found != needed:
        raise ConfigError(
            f"cluster={shape}: has {needed} tasks, and srun started this command "
            f"{'once' if found == 1 else f'{found} times'} (SLURM_STEP_NUM_TASKS)\n"
            f"  either start it as often (srun -n{needed}): each process is one of the tasks\n"
            "  or start it once (srun -n1) with cluster.started_by=kdist: kdist starts the tasks itself, on one machine"
        )
    rank, nodes = _number(environment, "SLURM_PROCID"), nodes_of_tasks(environment)
    if rank >= found:
        raise ConfigError(f"SLURM_PROCID={rank}: the step has {found} tasks (SLURM_STEP_NUM_TASKS)")
    own = environment.get("SLURMD_NODENAME", nodes[rank])
    if own != nodes[rank]:
        raise ConfigError(
            f"SLURM_PROCID={rank}: is on node {own}, but on {nodes[rank]} by SLURM_STEP_NODELIST, "
            "SLURM_STEP_TASKS_PER_NODE and SLURM_DISTRIBUTION; use srun --distribution=block"
        )
    addresses = _addresses(nodes, environment)
    workers, servers = addresses[: shape.num_workers], addresses[shape.num_workers : len(shape.tasks)]
    by_rank = (*shape.tasks[shape.num_ps :], *shape.tasks[: shape.num_ps], EVALUATOR)
    return Membership(ClusterSpec(tuple(servers), tuple(workers)), by_rank[rank])


def nodes_of_tasks(environment: Mapping[str, str]) -> list[str]:
    """The node of each task of the step, by rank; raises `ConfigError` if the variables do not say it."""
    nodes = hosts_in(environment.get("SLURM_STEP_NODELIST", ""))
    counts = counts_in(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(nodes) != len(counts) or sum(counts) != num_tasks(environment):
        raise ConfigError(
            f"SLURM_STEP_NODELIST has {len(nodes)} nodes, SLURM_STEP_TASKS_PER_NODE has {sum(counts)} tasks on "
            f"{len(counts)} nodes, and SLURM_STEP_NUM_TASKS={num_tasks(environment)}: these must agree"
        )
    given = environment.get("SLURM_DISTRIBUTION", "block")
    # What follows is about sockets and cores inside of a node.
    distribution = re.split("[:,]", given)[0]
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        # Of a heterogeneous step, Slurm tells the distribution of the last group only. Unless asked for another one, it
        # is block in each group, or there is one task on each node.
        distribution = "block"
    if distribution == "cyclic":
        rounds = range(max(counts))
        return [node for done in rounds for node, count in zip(nodes, counts) if count > done]
    if distribution in ("block", "*"):
        return [node for node, count in zip(nodes, counts) for _ in range(count)]
    raise ConfigError(f"SLURM_DISTRIBUTION={given}: kdist knows block and cyclic; use srun --distribution=block")


def hosts_in(text: str) -> list[str]:
    """The names in a hostlist, in its order: `a[1-2,07-08],b` is a1, a2, a07, a08, b; else raises `ConfigError`."""
    if re.fullmatch(f"{_NAME}(?:,{_NAME})*", text) is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={text}: is no hostlist, as node[1-3,07],other")
    hosts: list[str] = []
    for name in re.findall(_NAME, text):
        # Every second part was in brackets.
        parts = re.split(r"\[(.*?)\]", name)
        choices = [_numbers_in(part) if place % 2 else [part] for place, part in enumerate(parts)]
        hosts += map("".join, product(*choices))
    return hosts


def counts_in(text: str) -> list[int]:
    """The number of tasks on each node: `2(x2),1` is 2, 2, 1; raises `ConfigError` if it is not of this form."""
    counts: list[int] = []
    for part in text.split(","):
        if (match := _COUNT.fullmatch(part)) is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text}: the form is 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers_in(text: str) -> list[str]:
    """`1-3,07` is 1, 2, 3, 07; zeros in front of the first number of a range are kept."""
    numbers: list[str] = []
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            raise ConfigError(f"[{text}]: is no range of numbers, as [1-3,07]")
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers


def _addresses(nodes: list[str], environment: Mapping[str, str]) -> list[str]:
    """The address of each task by rank: its node, and a port that no other task of this node has."""
    ports = _ports(environment, max(Counter(nodes).values()))
    unused = defaultdict[str, Iterator[int]](lambda: iter(ports))
    return [f"{node}:{next(unused[node])}" for node in nodes]


def _ports(environment: Mapping[str, str], count: int) -> list[int]:
    """The ports of the tasks of a node: reserved by Slurm, or some that other steps hardly have."""
    if reserved := environment.get("SLURM_STEP_RESV_PORTS"):
        ports = [int(port) for port in _numbers_in(reserved.strip("[]"))]
        if len(ports) < count:
            raise ConfigError(
                f"SLURM_STEP_RESV_PORTS={reserved}: a node has {count} tasks; use srun --resv-ports={count}"
            )
        return ports
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    first = (job + 101 * step) % _NUM_RANGES * _PORTS_PER_RANGE
    return [_FIRST_PORT + (first + place) % (_NUM_RANGES * _PORTS_PER_RANGE) for place in range(count)]


def _number(environment: Mapping[str, str], name: str) -> int:
    if not (text := environment.get(name, "")).isdecimal():
        raise ConfigError(f"{name}={text}: must be a whole number, as Slurm sets it for the tasks of a step")
    return int(text)
