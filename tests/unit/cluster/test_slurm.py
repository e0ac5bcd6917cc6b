"""The cluster of a process, from the variables of a Slurm step."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.cluster.resolve import membership_of, shape_of
from kdist.cluster.slurm import counts_in, hosts_in, nodes_of_tasks
from kdist.cluster.spec import Membership, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError


def step(nodes: str, counts: str, rank: int = 0, **variables: str) -> dict[str, str]:
    """The variables of a task of step 0 of job 7."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(sum(counts_in(counts))),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_PROCID": str(rank),
        **variables,
    }


def joined(shape: str, environment: dict[str, str]) -> Membership:
    membership = membership_of(ClusterConfig(shape), environment)
    assert membership is not None
    return membership


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-c.d", ["a", "b-c.d"]),
        ("n7", ["n7"]),
        ("a[1-3,07-09],b", ["a1", "a2", "a3", "a07", "a08", "a09", "b"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("r[1-2]n[01-02]-ib,x[5]", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib", "x5"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_a_hostlist_has_the_names_of_its_hosts(text: str, hosts: list[str]) -> None:
    assert hosts_in(text) == hosts


_LITERALS = st.text("abz-.", min_size=1, max_size=3)


@st.composite
def _hostlists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A hostlist, and its hosts one by one."""
    texts, hosts = [], []
    for _ in range(draw(st.integers(1, 3))):
        parts = [draw(_LITERALS)]
        choices = [[parts[0]]]
        for _ in range(draw(st.integers(0, 3))):
            ranges, numbers = [], []
            for _ in range(draw(st.integers(1, 3))):
                width, first = draw(st.integers(1, 4)), draw(st.integers(0, 120))
                last = first + draw(st.integers(0, 12))
                low = str(first).zfill(width)
                ranges.append(low if last == first and draw(st.booleans()) else f"{low}-{last}")
                numbers += [str(number).zfill(len(low)) for number in range(first, last + 1)]
            literal = draw(st.sampled_from(["", "-ib", "x"]))
            parts += [f"[{','.join(ranges)}]", literal]
            choices += [numbers, [literal]]
        texts.append("".join(parts))
        hosts += ["".join(choice) for choice in product(*choices)]
    return ",".join(texts), hosts


@given(_hostlists())
def test_any_hostlist_has_its_hosts_in_order(hostlist: tuple[str, list[str]]) -> None:
    text, hosts = hostlist
    assert hosts_in(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "a,", "a[", "a[]", "a]", "a[1", "a[1-]", "a[-2]", "a[x]", "a b", "a[1[2]]"])
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_STEP_NODELIST|^\[.*\]: is no range of numbers"):
        hosts_in(text)


def test_counts_of_tasks_may_be_repeated() -> None:
    assert counts_in("1") == [1]
    assert counts_in("2(x2),1,3(x1)") == [2, 2, 1, 3]
    for wrong in ("", "2(x", "two", "2,"):
        with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
            counts_in(wrong)


@pytest.mark.parametrize("distribution", ["block", "block:cyclic", "*:block", "block,Pack"])
def test_block_fills_one_node_after_the_other(distribution: str) -> None:
    environment = step("a,b,c", "2(x2),1", SLURM_DISTRIBUTION=distribution)
    assert nodes_of_tasks(environment) == ["a", "a", "b", "b", "c"]
    del environment["SLURM_DISTRIBUTION"]
    assert nodes_of_tasks(environment) == ["a", "a", "b", "b", "c"]


@pytest.mark.parametrize("distribution", ["cyclic", "cyclic:block:fcyclic", "cyclic,NoPack"])
def test_cyclic_goes_round_the_nodes_that_have_room(distribution: str) -> None:
    environment = step("a,b,c", "1,3,2", SLURM_DISTRIBUTION=distribution)
    assert nodes_of_tasks(environment) == ["a", "b", "c", "b", "c", "b"]


def test_in_a_heterogeneous_step_the_groups_follow_each_other() -> None:
    environment = step("a,b,c,d", "2,1,1(x2)", SLURM_DISTRIBUTION="cyclic", SLURM_HET_SIZE="2")
    assert nodes_of_tasks(environment) == ["a", "a", "b", "c", "d"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from(["block", "cyclic"]))
def test_every_distribution_puts_as_many_tasks_on_a_node_as_slurm_says(counts: list[int], distribution: str) -> None:
    names = [f"n{index}" for index in range(len(counts))]
    environment = step(",".join(names), ",".join(map(str, counts)), SLURM_DISTRIBUTION=distribution)
    nodes = nodes_of_tasks(environment)
    assert [nodes.count(name) for name in names] == counts


@pytest.mark.parametrize(
    ("rank", "task"),
    [
        (0, Task("worker", 0)),
        (1, Task("worker", 1)),
        (2, Task("worker", 2)),
        (3, Task("ps", 0)),
        (4, Task("ps", 1)),
    ],
)
def test_rank_0_is_the_chief_and_servers_come_last(rank: int, task: Task) -> None:
    membership = joined("2ps3w", step("node[1-3]", "2(x2),1", rank))
    assert membership.task == task
    assert membership.is_chief is (rank == 0)
    spec = membership.spec
    assert spec.worker == ("node1:20448", "node1:20449", "node2:20448")
    assert spec.ps == ("node2:20449", "node3:20448")
    assert spec.chief is None
    assert str(shape_of(ClusterConfig("2ps3w"), membership)) == "2ps3w"


def test_without_servers_all_ranks_are_workers() -> None:
    membership = joined("3w", step("a,b", "2,1", 2))
    assert membership.task == Task("worker", 2)
    assert membership.runs_program
    assert len(membership.spec.worker) == 3


def test_an_evaluator_is_the_last_rank() -> None:
    members = [joined("1ps2w1e", step("a", "4", rank)) for rank in range(4)]
    assert [str(member.task) for member in members] == ["worker:0", "worker:1", "ps:0", "evaluator:0"]
    assert len({member.spec for member in members}) == 1
    assert len(members[0].spec.addresses) == 3


def test_reserved_ports_are_used() -> None:
    spec = joined("1ps2w", step("a,b", "2,1", SLURM_STEP_RESV_PORTS="12000-12001,12010")).spec
    assert spec.worker == ("a:12000", "a:12001")
    assert spec.ps == ("b:12000",)
    with pytest.raises(ConfigError, match=r"^SLURM_STEP_RESV_PORTS=12000: .*; use srun --resv-ports=2$"):
        joined("1ps2w", step("a,b", "2,1", SLURM_STEP_RESV_PORTS="12000"))


@given(st.integers(1, 10**8), st.integers(0, 1000))
def test_ports_are_none_that_connections_get_and_differ_between_neighbours(job: int, number: int) -> None:
    def ports(job: int, number: int) -> set[int]:
        spec = joined("2ps62w", step("a", "64", SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number))).spec
        return {int(address.rpartition(":")[2]) for address in (*spec.worker, *spec.ps)}

    found = ports(job, number)
    assert len(found) == 64
    assert 20000 <= min(found) <= max(found) < 32768
    assert not found & ports(job + 1, number)
    assert not found & ports(job, number + 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURMD_NODENAME": "c"}, ["SLURM_PROCID=0: is on node c, but on a", "srun --distribution=block"]),
        ({"SLURM_DISTRIBUTION": "plane"}, ["SLURM_DISTRIBUTION=plane: ", "srun --distribution=block"]),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, ["SLURM_DISTRIBUTION=arbitrary: ", "srun --distribution=block"]),
        ({"SLURM_STEP_NODELIST": "a,b,c"}, ["SLURM_STEP_NODELIST has 3 nodes", "on 2 nodes", "these must agree"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, ["SLURM_STEP_NODELIST has 2 nodes", "these must agree"]),
        ({"SLURM_PROCID": "3"}, ["SLURM_PROCID=3: the step has 3 tasks"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID=x: must be a whole number"]),
        ({"SLURM_JOB_ID": ""}, ["SLURM_JOB_ID=: must be a whole number"]),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(variables: dict[str, str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        joined("1ps2w", {**step("a,b", "2,1"), **variables})
    for words in said:
        assert words in str(error.value)


@pytest.mark.parametrize(("started_by", "count", "times"), [("auto", 3, "3 times"), ("slurm", 1, "once")])
def test_a_step_with_another_number_of_tasks_is_refused_with_both_remedies(
    started_by: str, count: int, times: str
) -> None:
    with pytest.raises(ConfigError) as error:
        membership_of(ClusterConfig("2ps3w", started_by=started_by), step("a", str(count)))
    message = str(error.value)
    assert message.startswith(f"cluster=2ps3w: has 5 tasks, and srun started this command {times} (SLURM_STEP_NUM")
    for remedy in ("(srun -n5)", "(srun -n1)", "cluster.started_by=kdist"):
        assert remedy in message


def test_slurms_own_library_for_mpi_is_no_other_launcher() -> None:
    assert joined("1ps2w", step("a,b", "2,1", PMI_SIZE="3")).is_chief
    with pytest.raises(ConfigError, match="mpirun started this command 6 times"):
        joined("1ps2w", step("a,b", "2,1", OMPI_COMM_WORLD_SIZE="6"))
