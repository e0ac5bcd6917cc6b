"""Values that tasks compare with each other, and the message about differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kdist.cluster.description import TaskFingerprint, differences, mismatch_error
from kdist.cluster.spec import ClusterSpec, Membership, Task

SPEC = ClusterSpec(("h1:1",), ("h2:1", "h3:1"))
CONFIG: dict[str, Any] = {
    "model": {"_target_": "mine.build", "sizes": [100, 10]},
    "data": None,
    "optimizer": {"learning_rate": 0.1, "name": None},
    "strategy": {"name": "auto", "arguments": {}},
    "train": {"batch_size": 32, "steps": 100, "epochs": None},
    "run": {"seed": 3, "dir": "runs/a", "health_port": None},
    "cluster": {"job": "ps", "task": 0},
    "hooks": {"nan": {}},
}


def described(**changes: Any) -> TaskFingerprint:
    """A description of `CONFIG` with other values, by group."""
    return TaskFingerprint.of(Membership(SPEC, Task("worker", 0)), {**CONFIG, **changes})


def test_a_task_agrees_with_itself_after_the_journey() -> None:
    assert differences(described(), TaskFingerprint.from_json(described().to_json())) == []


def test_what_belongs_to_one_task_may_differ() -> None:
    others = {
        "run": {"seed": 3, "dir": "/elsewhere", "health_port": 8080},
        "cluster": {"job": "worker", "task": 1},
        "hooks": {},
        "train": {**CONFIG["train"], "steps": 200, "epochs": 7},
    }
    assert differences(described(), described(**others)) == []


def test_differences_of_the_config_have_their_keys_and_both_values() -> None:
    other = described(
        model={"_target_": "mine.build", "sizes": [100, 20], "dropout": 0.5},
        optimizer={"learning_rate": 0.01, "name": None},
        run={"seed": None},
    )
    assert differences(described(), other) == [
        "model.sizes=[100, 20], chief [100, 10]",
        "optimizer.learning_rate=0.01, chief 0.1",
        "run.seed=null, chief 3",
        "model.dropout=0.5, chief null",
    ]


def test_differences_of_versions_and_addresses_are_named() -> None:
    here = described()
    other = replace(here, versions={**here.versions, "keras": "3.0.0"}, addresses={**here.addresses, "ps": ["h9:1"]})
    assert differences(here, other) == [
        f"keras 3.0.0, chief {here.versions['keras']}",
        'addresses of ps=["h9:1"], chief ["h1:1"]',
    ]


def test_of_a_program_and_the_command_line_only_versions_are_compared() -> None:
    of_program = described(fit={"shuffle": True}, strategy={"name": "parameter_server"}, run={"seed": 12345})
    assert differences(described(), of_program) == []
    assert differences(of_program, described(fit={"shuffle": False}, strategy={"name": "parameter_server"})) == [
        "fit.shuffle=false, chief true"
    ]


def test_the_error_names_tasks_and_not_more_than_ten_differences_of_each() -> None:
    found = {"ps:0": ["keras 3.0.0, chief 3.1.0"], "worker:1": [f"train.x{i}=1, chief 2" for i in range(12)]}
    error = mismatch_error(found)
    assert error.exit_code == 2
    first, *lines = str(error).splitlines()
    assert first == "ps:0, worker:1: differ from the chief; all tasks need the same versions and config"
    assert lines[0] == "  ps:0: keras 3.0.0, chief 3.1.0"
    assert len(lines) == 12
    assert lines[-1] == "  worker:1: and 2 more"
