"""The identity of a process of a Slurm step, by the variables that Slurm itself sets."""

from __future__ import annotations

import random
import re

import pytest
from slurm_system import SlurmSystem

from kdist.cluster.slurm import hosts_in

pytestmark = pytest.mark.long

#: Prints the rank of a process, its node, and its task and the cluster spec as kdist finds them.
_WHO = """
import os
from kdist.cluster.resolve import membership_of
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError
try:
    found = membership_of(ClusterConfig(os.environ["SHAPE"]), os.environ)
    print("RANK", os.environ["SLURM_PROCID"], os.environ["SLURMD_NODENAME"], found.task, found.spec, sep="|")
except ConfigError as error:
    print("ERROR", error, sep="|")
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--ntasks=5", "--nodes=4"],
        ["--ntasks=5"],
        ["--ntasks=5", "--nodes=3", "--distribution=block"],
        ["--ntasks=5", "--nodes=3", "--distribution=cyclic"],
        ["--ntasks=5", "--nodes=2", "--distribution=cyclic:block"],
        ["--ntasks=5", "--nodes=3", "--distribution=*:*,NoPack"],
        ["--ntasks=5", "--nodes=3", "--exclude=host2"],
        ["--ntasks=1", "--nodes=1", "python", "-c", _WHO, ":", "--ntasks=4", "--nodes=2"],
        ["--ntasks=3", "--nodes=2", "python", "-c", _WHO, ":", "--ntasks=2", "--nodes=2"],
    ],
    ids=lambda options: " ".join(options).replace(_WHO, "..."),
)
def test_every_task_is_where_the_others_look_for_it(slurm: SlurmSystem, options: list[str]) -> None:
    said = slurm.run("srun", *options, "python", "-c", _WHO, variables={"SHAPE": "2ps3w"})
    rows = sorted(line.split("|") for line in said.splitlines() if line.startswith("RANK"))
    assert [row[1] for row in rows] == ["0", "1", "2", "3", "4"], said
    assert [row[3] for row in rows] == ["worker:0", "worker:1", "worker:2", "ps:0", "ps:1"]
    # All of them have the same addresses, and each finds its own node in its own.
    assert len({row[4] for row in rows}) == 1
    ps, worker = (re.findall(rf"{job}=\((.*?)\)", rows[0][4])[0] for job in ("ps", "worker"))
    addresses = re.findall(r"'(.*?)'", worker) + re.findall(r"'(.*?)'", ps)
    assert [address.rpartition(":")[0] for address in addresses] == [row[2] for row in rows]
    assert len(set(addresses)) == 5


def test_a_distribution_that_is_not_known_is_refused_by_every_task(slurm: SlurmSystem) -> None:
    keys = ("srun", "--ntasks=5", "--nodes=2", "--distribution=plane=2", "python", "-c", _WHO)
    said = slurm.run(*keys, variables={"SHAPE": "2ps3w"})
    assert said.count("ERROR|SLURM_DISTRIBUTION=plane: kdist knows block and cyclic") == 5, said


def test_another_number_of_tasks_is_refused_by_every_one_of_them(slurm: SlurmSystem) -> None:
    said = slurm.run("srun", "--ntasks=3", "python", "-c", _WHO, variables={"SHAPE": "2ps3w"})
    assert said.count("ERROR|cluster=2ps3w: has 5 tasks, and srun started this command 3 times") == 3, said


def test_slurm_reads_hostlists_in_the_same_way(slurm: SlurmSystem) -> None:
    draw = random.Random(7)

    def bracket() -> str:
        ranges = []
        for _ in range(draw.randint(1, 3)):
            first = draw.randint(0, 20)
            low, high = (str(number).zfill(2) for number in (first, first + draw.randint(0, 9)))
            ranges.append(draw.choice([low, f"{low}-{high}"]))
        return f"[{','.join(ranges)}]"

    for _ in range(40):
        names = [
            draw.choice(["a", "node", "r-b"]) + "".join(draw.choice(["", "n"]) + bracket() for _ in range(brackets))
            for brackets in draw.choices([0, 1, 2], k=draw.randint(1, 4))
        ]
        text = ",".join(names)
        assert hosts_in(text) == slurm.run("scontrol", "show", "hostnames", text).split(), text
