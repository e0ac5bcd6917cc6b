"""What `result.json` records of a config: everything but what comes from the environment."""

import pytest
from omegaconf import OmegaConf

from kdist.config.recorded import plain_values, recorded
from kdist.config.schema import Config


def test_values_are_resolved_and_those_of_the_environment_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "correct-horse")
    monkeypatch.setenv("STEPS", "40")
    config = OmegaConf.merge(
        OmegaConf.structured(Config),
        {
            "data": {
                "password": "${oc.env:PASSWORD}",
                "url": "db://me:${oc.env:PASSWORD}@host",
                "again": "${data.password}",
                "list": [1, "${run.seed}", {"deep": "${oc.env:NOT_SET,nothing}"}],
                "all": "${data.list}",
            },
            "train": {"steps": "${oc.decode:${oc.env:STEPS}}", "batch_size": "${model.units}"},
            "model": {"_target_": "my.model", "units": 64, "missing": "???"},
            "run": {"seed": 3, "name": "x", "dir": "runs/${run.name}"},
        },
    )
    found = recorded(config)
    assert found["data"] == {
        "password": "${oc.env:PASSWORD}",
        "url": "db://me:${oc.env:PASSWORD}@host",
        "again": "${data.password}",
        "list": [1, 3, {"deep": "${oc.env:NOT_SET,nothing}"}],
        "all": [1, 3, {"deep": "${oc.env:NOT_SET,nothing}"}],
    }
    assert found["train"]["steps"] == "${oc.decode:${oc.env:STEPS}}"
    assert found["train"]["batch_size"] == 64
    assert found["model"] == {"_target_": "my.model", "units": 64, "missing": "???"}
    assert (found["cluster"]["shape"], found["run"]["dir"]) == ("local", "runs/x")
    # What the config says goes on to be what it is.
    assert config.data.url == "db://me:correct-horse@host"
    # A reader in the same environment gets the same config.
    assert OmegaConf.create(found).data.again == "correct-horse"


def test_arguments_that_are_no_plain_values_are_left_out() -> None:
    given = {"units": [8, (4, 2)], "rate": 0.1, "note": None, "model": object(), "inner": {1: "a", "function": print}}
    assert plain_values(given) == {"units": [8, [4, 2]], "rate": 0.1, "note": None, "inner": {"1": "a"}}
