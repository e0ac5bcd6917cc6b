"""The cluster of a process, from the config or from TF_CONFIG."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdist.cluster.processes.child import visible_devices
from kdist.cluster.resolve import membership_of, shape_of
from kdist.cluster.spec import CHIEF, ClusterSpec, Membership, Task
from kdist.config.schema import ClusterConfig, DevicesConfig
from kdist.errors import ConfigError

HOSTS: dict[str, Any] = {"ps": ["a:1", "a:2"], "worker": ["b:1", "b:2"]}
WITH_CHIEF: dict[str, Any] = {**HOSTS, "chief": ["c:1"]}
WORKERS: dict[str, Any] = {"worker": ["b:1", "b:2"]}
WORKERS_WITH_CHIEF: dict[str, Any] = {**WORKERS, "chief": ["c:1"]}
FORM = '{"cluster": {"ps": ["host:port"], "worker": [...]}, "task": {"type": "worker", "index": 0}}'


def by_hosts(**keys: Any) -> Membership:
    membership = membership_of(ClusterConfig("hosts", **{**HOSTS, **keys}), {})
    assert membership is not None
    return membership


def by_tf_config(cluster: Any, **task: Any) -> Membership:
    return by_text(json.dumps({"cluster": cluster, "task": task}))


def by_text(text: str) -> Membership:
    membership = membership_of(ClusterConfig("tf_config"), {"TF_CONFIG": text})
    assert membership is not None
    return membership


def refusal(error: pytest.ExceptionInfo[ConfigError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shape", ["local", "2ps2w", "4w"])
def test_a_cluster_that_kdist_starts_has_no_members(shape: str) -> None:
    config = ClusterConfig(shape, started_by="kdist")
    assert membership_of(config, {"TF_CONFIG": "this is not read"}) is None
    assert str(shape_of(config, None)) == shape


@pytest.mark.parametrize(
    ("keys", "task", "is_chief"),
    [
        ({"job": "ps"}, Task("ps", 0), False),
        ({"job": "ps", "task": 1}, Task("ps", 1), False),
        ({"job": "worker"}, Task("worker", 0), True),
        ({"job": "worker", "task": 0}, Task("worker", 0), True),
        ({"job": "worker", "task": 1}, Task("worker", 1), False),
        ({"job": "ps", "chief": "c:1"}, Task("ps", 0), False),
        ({"job": "worker", "chief": "c:1"}, Task("worker", 0), False),
        ({"job": "chief", "chief": "c:1"}, CHIEF, True),
        ({"job": "chief", "chief": "c:1", "task": 0}, CHIEF, True),
    ],
)
def test_hosts_say_what_this_process_is(keys: dict[str, Any], task: Task, is_chief: bool) -> None:
    membership = by_hosts(**keys)
    assert membership.spec == ClusterSpec(("a:1", "a:2"), ("b:1", "b:2"), keys.get("chief"))
    assert membership.task == task
    assert membership.is_chief is is_chief
    # With servers only the chief runs the program.
    assert membership.runs_program is is_chief
    assert str(shape_of(ClusterConfig("hosts"), membership)) == "2ps2w"


@pytest.mark.parametrize(
    ("cluster", "task", "expected", "is_chief"),
    [
        (HOSTS, {"type": "ps", "index": 1}, Task("ps", 1), False),
        (HOSTS, {"type": "ps", "index": "1"}, Task("ps", 1), False),
        (HOSTS, {"type": "ps"}, Task("ps", 0), False),
        (HOSTS, {"type": "worker", "index": 0}, Task("worker", 0), True),
        (HOSTS, {"type": "worker", "index": 1}, Task("worker", 1), False),
        (WITH_CHIEF, {"type": "worker", "index": 0}, Task("worker", 0), False),
        (WITH_CHIEF, {"type": "chief", "index": 0}, CHIEF, True),
        (WITH_CHIEF, {"type": "evaluator", "index": 0}, Task("evaluator", 0), False),
        (HOSTS, {"type": "evaluator", "index": 3}, Task("evaluator", 3), False),
    ],
)
def test_tf_config_says_what_this_process_is(
    cluster: dict[str, Any], task: dict[str, Any], expected: Task, is_chief: bool
) -> None:
    membership = by_tf_config(cluster, **task)
    assert membership.spec == ClusterSpec(("a:1", "a:2"), ("b:1", "b:2"), "c:1" if "chief" in cluster else None)
    assert membership.task == expected
    assert membership.is_chief is is_chief
    assert membership.runs_program is is_chief


def test_master_is_the_chief_of_tf1() -> None:
    cluster = {**HOSTS, "master": ["c:1"]}
    as_chief = by_tf_config(WITH_CHIEF, type="chief", index=0)
    assert by_tf_config(cluster, type="master", index=0) == as_chief
    assert by_tf_config(cluster, type="worker", index=1).spec == as_chief.spec


def test_an_evaluator_is_no_part_of_the_cluster() -> None:
    cluster = {**WITH_CHIEF, "evaluator": ["e:1"]}
    for job in ("chief", "ps", "worker", "evaluator"):
        membership = by_tf_config(cluster, type=job, index=0)
        assert membership.spec == ClusterSpec(("a:1", "a:2"), ("b:1", "b:2"), "c:1")
        assert membership.runs_program is (job == "chief")
        assert membership.evaluates is (job == "evaluator")
    assert by_hosts(chief="c:1", job="evaluator") == by_tf_config(cluster, type="evaluator", index=0)


@pytest.mark.parametrize(
    ("task", "index", "is_chief"), [({"type": "worker"}, 0, True), ({"type": "worker", "index": 1}, 1, False)]
)
def test_without_servers_every_worker_runs_the_program(task: dict[str, Any], index: int, is_chief: bool) -> None:
    membership = by_tf_config(WORKERS, **task)
    assert membership == Membership(ClusterSpec((), ("b:1", "b:2")), Task("worker", index))
    assert membership == by_hosts(ps=[], job="worker", task=index)
    assert membership.is_chief is is_chief
    assert membership.runs_program
    assert str(shape_of(ClusterConfig("tf_config"), membership)) == "2w"


@pytest.mark.parametrize(
    ("job", "index", "becomes"), [("chief", 0, 0), ("master", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_without_servers_the_chief_of_tf_config_is_the_first_worker(job: str, index: int, becomes: int) -> None:
    membership = by_tf_config(WORKERS_WITH_CHIEF, type=job, index=index)
    assert membership == Membership(ClusterSpec((), ("c:1", "b:1", "b:2")), Task("worker", becomes))
    assert membership.is_chief is (becomes == 0)
    assert membership.runs_program


@pytest.mark.parametrize(("job", "index", "becomes"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)])
def test_without_servers_the_chief_of_hosts_is_the_first_worker(job: str, index: int, becomes: int) -> None:
    membership = by_hosts(ps=[], chief="c:1", job=job, task=index)
    assert membership == Membership(ClusterSpec((), ("c:1", "b:1", "b:2")), Task("worker", becomes))


def test_a_chief_without_workers_trains_and_its_evaluator_knows() -> None:
    alone = {"chief": ["c:1"]}
    assert by_tf_config(alone, type="chief", index=0).is_chief
    assert not by_tf_config(alone, type="evaluator", index=0).runs_program


def test_addresses_may_be_of_ipv6() -> None:
    assert by_hosts(ps=["[::1]:2222"], job="ps").spec.ps == ("[::1]:2222",)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, ["cluster.job is not given", "ps, worker, chief, evaluator"]),
        ({"job": "boss"}, ["cluster.job=boss", "ps, worker, chief, evaluator"]),
        ({"job": "worker", "task": -1}, ["cluster.task=-1", "whole number, at least 0"]),
        ({"job": "worker", "task": 2}, ["cluster.task", "worker:2", "cluster.worker has 2 such tasks"]),
        ({"job": "ps", "task": 2}, ["cluster.task", "ps:2", "cluster.ps has 2 such tasks"]),
        ({"job": "ps", "ps": []}, ["cluster.task", "ps:0", "cluster.ps has no such task"]),
        ({"job": "chief"}, ["cluster.task", "chief", "cluster.chief has no such task"]),
        ({"job": "chief", "chief": "c:1", "task": 1}, ["cluster.task", "chief:1", "cluster.chief has 1 such task"]),
        ({"job": "ps", "worker": []}, ["cluster.worker", "no worker"]),
        ({"job": "ps", "ps": ["a"]}, ["cluster.ps: a:", "host:port"]),
        ({"job": "ps", "ps": ["a:"]}, ["cluster.ps: a::", "host:port"]),
        ({"job": "ps", "ps": [":5"]}, ["cluster.ps: :5:", "host:port"]),
        ({"job": "ps", "ps": ["a:0"]}, ["cluster.ps: a:0:", "host:port"]),
        ({"job": "ps", "ps": ["a:65536"]}, ["cluster.ps: a:65536:", "host:port"]),
        ({"job": "ps", "ps": ["a:http"]}, ["cluster.ps: a:http:", "host:port"]),
        ({"job": "ps", "ps": ["a b:1"]}, ["cluster.ps: a b:1:", "host:port"]),
        ({"job": "ps", "ps": ["grpc://a:1"]}, ["cluster.ps: grpc://a:1:", "host:port"]),
        ({"job": "ps", "ps": ["a:1,a:2"]}, ["cluster.ps: a:1,a:2:", "host:port"]),
        ({"job": "ps", "chief": "c"}, ["cluster.chief: c:", "host:port"]),
        ({"job": "ps", "ps": ["a:1", "a:1"]}, ["cluster.ps", "ps:0", "ps:1", "both at a:1", "each needs its own"]),
        ({"job": "ps", "ps": ["b:2"]}, ["cluster.worker", "ps:0", "worker:1", "both at b:2", "each needs its own"]),
        ({"job": "ps", "chief": "a:2"}, ["cluster.chief", "chief", "ps:1", "both at a:2", "each needs its own"]),
    ],
    ids=str,
)
def test_wrong_hosts_are_refused(keys: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        by_hosts(**keys)
    for words in said:
        assert words in refusal(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["TF_CONFIG is not set"]),
        ("{", ["TF_CONFIG: is not JSON"]),
        ("worker:0", ["TF_CONFIG: is not JSON"]),
        ("3", ["TF_CONFIG: has no cluster"]),
        ("[]", ["TF_CONFIG: has no cluster"]),
        ('{"task": {"type": "ps"}}', ["TF_CONFIG: has no cluster"]),
        ('{"cluster": ["a:1"], "task": {"type": "ps"}}', ["TF_CONFIG: has no cluster"]),
        ('{"cluster": {"worker": ["b:1"]}}', ["TF_CONFIG: has no task"]),
        ('{"cluster": {"worker": ["b:1"]}, "task": "worker"}', ["TF_CONFIG: has no task"]),
        ('{"cluster": {"worker": ["b:1"]}, "task": {"index": 0}}', ["TF_CONFIG: task has no type"]),
    ],
)
def test_a_tf_config_without_its_parts_is_refused_with_its_form(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        by_text(text)
    for words in [*said, FORM]:
        assert words in refusal(error)


def test_a_tf_config_that_is_not_set_is_refused_with_its_form() -> None:
    with pytest.raises(ConfigError, match=r"cluster=tf_config: TF_CONFIG is not set") as error:
        membership_of(ClusterConfig("tf_config"), {})
    assert FORM in refusal(error)


@pytest.mark.parametrize(
    ("cluster", "task", "said"),
    [
        ({**HOSTS, "boss": ["x:1"]}, {"type": "ps"}, ["cluster", "boss", "ps, worker, chief"]),
        ({**HOSTS, "ps": "a:1"}, {"type": "ps"}, ["cluster.ps", "list of addresses, host:port"]),
        ({**HOSTS, "worker": {"0": "b:1"}}, {"type": "ps"}, ["cluster.worker", "list of addresses, host:port"]),
        ({**HOSTS, "worker": []}, {"type": "ps"}, ["cluster.worker", "no worker"]),
        ({"ps": ["a:1"]}, {"type": "ps"}, ["cluster.worker", "no worker"]),
        ({}, {"type": "worker"}, ["cluster.worker", "no worker"]),
        ({**HOSTS, "ps": ["a"]}, {"type": "ps"}, ["cluster.ps: a:", "host:port"]),
        ({**HOSTS, "ps": [2222]}, {"type": "ps"}, ["cluster.ps: 2222:", "host:port"]),
        ({**HOSTS, "chief": ["b:1"]}, {"type": "ps"}, ["cluster.chief", "worker:0", "both at b:1"]),
        ({**HOSTS, "chief": ["c:1", "c:2"]}, {"type": "chief"}, ["cluster.chief", "one chief, not 2"]),
        ({**WORKERS, "chief": ["c:1", "c:2"]}, {"type": "chief"}, ["cluster.chief", "one chief, not 2"]),
        (HOSTS, {"type": "boss"}, ["task.type", "boss", "ps, worker, chief"]),
        (WORKERS_WITH_CHIEF, {"type": "boss"}, ["task.type", "boss", "ps, worker, chief"]),
        (HOSTS, {"type": 7}, ["task.type", "7", "ps, worker, chief"]),
        (HOSTS, {"type": "chief"}, ["chief", "cluster.chief has no such task"]),
        (HOSTS, {"type": "ps", "index": 2}, ["task.index", "ps:2", "cluster.ps has 2 such tasks"]),
        (WORKERS, {"type": "worker", "index": 2}, ["task.index", "worker:2", "cluster.worker has 2 such tasks"]),
        (WORKERS_WITH_CHIEF, {"type": "worker", "index": 2}, ["worker:2", "cluster.worker has 2 such tasks"]),
        (WORKERS_WITH_CHIEF, {"type": "ps", "index": 0}, ["ps:0", "cluster.ps has no such task"]),
        (HOSTS, {"type": "ps", "index": "one"}, ["task.index=one", "whole number, at least 0"]),
        (HOSTS, {"type": "ps", "index": None}, ["task.index=None", "whole number, at least 0"]),
        (HOSTS, {"type": "ps", "index": -1}, ["task.index=-1", "whole number, at least 0"]),
        (WORKERS_WITH_CHIEF, {"type": "worker", "index": -1}, ["task.index=-1", "whole number, at least 0"]),
        (HOSTS, {"type": "ps", "index": 0.5}, ["task.index=0.5", "whole number, at least 0"]),
        (HOSTS, {"type": "ps", "index": True}, ["task.index=True", "whole number, at least 0"]),
    ],
    ids=str,
)
def test_a_wrong_tf_config_is_refused(cluster: dict[str, Any], task: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        by_tf_config(cluster, **task)
    for words in ["TF_CONFIG", *said]:
        assert words in refusal(error)


@pytest.mark.parametrize("shape", ["local", "2ps2w", "tf_config"])
@pytest.mark.parametrize(
    ("key", "value"), [("ps", ["a:1"]), ("worker", ["b:1"]), ("chief", "c:1"), ("job", "ps"), ("task", 0)]
)
def test_keys_of_hosts_are_refused_elsewhere(shape: str, key: str, value: Any) -> None:
    right = json.dumps({"cluster": HOSTS, "task": {"type": "worker", "index": 0}})
    with pytest.raises(ConfigError, match=rf"^cluster\.{key}.*cluster=hosts, not for cluster={shape}$"):
        membership_of(ClusterConfig(shape, **{key: value}), {"TF_CONFIG": right})


@pytest.mark.parametrize(
    ("devices", "task", "visible"),
    [
        ({}, Task("worker", 0), None),
        ({"worker": [0, 1]}, Task("worker", 0), "0,1"),
        ({"worker": [0, 1]}, Task("worker", 1), "0,1"),
        ({"worker": [0, 1]}, Task("ps", 0), None),
        ({"worker": [0, 1]}, CHIEF, None),
        ({"worker": [[0], [1, 2]]}, Task("worker", 0), "0"),
        ({"worker": [[0], [1, 2]]}, Task("worker", 1), "1,2"),
        ({"worker": [[], [1]]}, Task("worker", 0), ""),
        ({"worker": [[0]]}, Task("worker", 1), ""),
        ({"worker": []}, Task("worker", 0), ""),
        ({"ps": [3]}, Task("ps", 1), "3"),
        ({"chief": [2]}, CHIEF, "2"),
        ({"chief": [[2]]}, CHIEF, "2"),
    ],
    ids=str,
)
def test_devices_are_of_a_job_or_of_each_task(devices: dict[str, Any], task: Task, visible: str | None) -> None:
    assert visible_devices(task, DevicesConfig(**devices)) == visible


def test_nothing_said_of_devices_leaves_them_as_they_are() -> None:
    assert visible_devices(Task("worker", 0), None) is None


@pytest.mark.parametrize("job", ["ps", "worker", "chief"])
@pytest.mark.parametrize(
    "devices", [0, "0", "", False, {"0": 1}, ["0"], [-1], [True], [0.5], [None], [[[0]]], [[0], 1], [0, [1]]], ids=str
)
def test_wrong_devices_are_refused(job: str, devices: Any) -> None:
    with pytest.raises(ConfigError) as error:
        DevicesConfig(**{job: devices})
    assert refusal(error).startswith(f"cluster.devices.{job}={devices}: must be a list of GPU numbers, as [0,1]")


@pytest.mark.parametrize("shape", ["2ps2w", "4w"])
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_copies_of_a_command_that_starts_its_own_tasks_are_refused(shape: str, variable: str) -> None:
    with pytest.raises(ConfigError) as error:
        membership_of(ClusterConfig(shape), {variable: "3"})
    message = str(error.value)
    assert message.startswith(f"cluster={shape}: ")
    assert f"started this command 3 times ({variable})" in message
    for remedy in (" -n 1", "cluster=hosts", "TF_CONFIG"):
        assert remedy in message
    assert membership_of(ClusterConfig(shape, started_by="kdist"), {variable: "3"}) is None


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "3"},
        {"PMI_SIZE": ""},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": json.dumps({"cluster": {"chief": ["c:1"]}, "task": {"type": "chief", "index": 0}})},
    ],
)
def test_a_process_that_is_alone_starts_the_tasks(environment: dict[str, str]) -> None:
    assert membership_of(ClusterConfig("2ps2w"), environment) is None


@pytest.mark.parametrize("started_by", ["auto", "tf_config"])
@pytest.mark.parametrize(
    ("shape", "cluster"), [("2ps2w", HOSTS), ("2ps2w", WITH_CHIEF), ("2w", WORKERS), ("3w", WORKERS_WITH_CHIEF)]
)
def test_a_tf_config_with_the_tasks_of_the_shape_is_joined(shape: str, cluster: Any, started_by: str) -> None:
    text = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
    # Slurm, too, may have started the processes, by a script that sets TF_CONFIG for each.
    environment = {"TF_CONFIG": text, "SLURM_STEP_NUM_TASKS": "7"}
    membership = membership_of(ClusterConfig(shape, started_by=started_by), environment)
    assert membership == by_text(text)
    assert str(shape_of(ClusterConfig(shape), membership)) == shape


def test_an_evaluator_of_a_shape_is_joined() -> None:
    text = json.dumps({"cluster": HOSTS, "task": {"type": "evaluator", "index": 0}})
    membership = membership_of(ClusterConfig("2ps2w"), {"TF_CONFIG": text})
    assert membership is not None
    assert membership.evaluates


@pytest.mark.parametrize("started_by", ["auto", "tf_config"])
@pytest.mark.parametrize("shape", ["2ps3w", "3ps2w", "4w", "2w"])
def test_a_tf_config_with_other_tasks_than_the_shape_is_refused(shape: str, started_by: str) -> None:
    text = json.dumps({"cluster": HOSTS, "task": {"type": "worker", "index": 0}})
    with pytest.raises(ConfigError) as error:
        membership_of(ClusterConfig(shape, started_by=started_by), {"TF_CONFIG": text})
    message = str(error.value)
    assert message.startswith(f"cluster={shape}: TF_CONFIG has the tasks of 2ps2w\n")
    for remedy in ("as cluster=2ps2w", "cluster.started_by=kdist"):
        assert remedy in message


def test_a_tf_config_that_is_not_one_is_refused_with_what_ignores_it() -> None:
    with pytest.raises(ConfigError, match=r"^TF_CONFIG: is not JSON [^\n]*\n  cluster\.started_by=kdist ignores it$"):
        membership_of(ClusterConfig("2ps2w"), {"TF_CONFIG": "{broken"})
    assert membership_of(ClusterConfig("local"), {"TF_CONFIG": "{broken"}) is None


@pytest.mark.parametrize(
    ("started_by", "shape", "said"),
    [
        ("tf_config", "2ps2w", "cluster.started_by=tf_config: TF_CONFIG is not set"),
        ("slurm", "2ps2w", "cluster.started_by=slurm: SLURM_STEP_NUM_TASKS is not set; start this command by srun"),
        ("tf_config", "local", "cluster.started_by=tf_config: cluster=local is one process; give NpsMw or Mw"),
        ("slurm", "1w", "cluster.started_by=slurm: cluster=1w is one process; give NpsMw or Mw"),
        ("kdist", "tf_config", "cluster.started_by=kdist: is for NpsMw and Mw, not for tf_config"),
        ("slurm", "hosts", "cluster.started_by=slurm: is for NpsMw and Mw, not for hosts"),
    ],
)
def test_who_starts_the_tasks_must_have_done_so(started_by: str, shape: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        membership_of(ClusterConfig(shape, started_by=started_by), {})
    assert refusal(error).startswith(said)


def test_an_unknown_starter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.started_by=me: choose one of auto, kdist, slurm, tf_config$"):
        ClusterConfig("2ps2w", started_by="me")


def test_tasks_that_a_launcher_starts_each_with_its_own_are_joined() -> None:
    config = ClusterConfig("hosts", **HOSTS, job="ps", task=1)
    membership = membership_of(config, {"SLURM_STEP_NUM_TASKS": "4"})
    assert membership is not None
    assert membership.task == Task("ps", 1)
    assert membership_of(ClusterConfig("local"), {"SLURM_STEP_NUM_TASKS": "4"}) is None


def test_the_chiefs_port_is_for_tasks_on_other_hosts() -> None:
    assert by_hosts(job="worker", chief_port=2230).is_chief
    with pytest.raises(ConfigError, match=r"cluster\.chief_port: is for tasks that others start; .* of 2ps2w"):
        membership_of(ClusterConfig("2ps2w", chief_port=2230), {})
    for port in (0, 65536):
        with pytest.raises(ConfigError, match=rf"cluster\.chief_port={port}: must be a port"):
            ClusterConfig("hosts", chief_port=port)


def test_patience_is_at_least_a_second() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.patience=0\.5: must be at least 1"):
        ClusterConfig("hosts", patience=0.5)
