"""The record of a config in `result.json`: everything but what comes from the environment."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kdist.config.record import check_record, plain_values, read_record, record_of
from kdist.config.schema import Config
from kdist.errors import ConfigError

BOMBS = {
    "aliases": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
    "depth": "model: " + "[" * 500 + "]" * 500,
    "size": "model: " + "x" * (1 << 21),
    "references": "model: ${a60}\na0: x\n" + "".join(f"a{i}: ${{a{i - 1}}}${{.a{i - 1}}}\n" for i in range(1, 61)),
    "references in lists": "a0: x\nmodel: ${a30}\n"
    + "".join(f"a{i}: ['${{a{i - 1}}}', '${{oc.select:a{i - 1}}}', '${{..a{i - 1}}}']\n" for i in range(1, 31)),
    "indices with a sign": "a0: [x]\nmodel: ${a40.0}\n"
    + "".join(f"a{i}: ['${{a{i - 1}.+0}}${{a{i - 1}.0_0}}']\n" for i in range(1, 41)),
    "keys of two types": "a0: {'1': x}\nmodel: ${a40.1}\n"
    + "".join(f"a{i}: {{1: y, '1': '${{a{i - 1}.1}}${{a{i - 1}.1}}'}}\n" for i in range(1, 41)),
    "computed keys": "a0: x\nmodel: ${a40}\nn0: a0\n"
    + "".join(f"a{i}: '${{${{n{i - 1}}}}}${{oc.select:${{n{i - 1}}}}}'\nn{i}: a{i}\n" for i in range(1, 41)),
    "selected keys": "a0: x\nmodel: ${a40}\nn0: a0\n"
    + "".join(f"a{i}: '${{oc.select:${{n{i - 1}}}}}${{oc.select:a{i - 1}}}'\nn{i}: a{i}\n" for i in range(1, 41)),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS.keys())
def test_a_record_that_would_use_up_the_machine_is_refused_at_once(content: str, tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml (has|is nested)|refers to|stands for more than"):
        check_record(read_record(tmp_path / ".hydra" / "config.yaml"))


def test_a_record_that_refers_to_itself_here_and_there_is_read(tmp_path: Path) -> None:
    content = OmegaConf.to_yaml(OmegaConf.structured(Config)) + "more: {a: '${run.dir}', b: ['${.0}', '${..a}']}\n"
    (tmp_path / "config.yaml").write_text(content)
    check_record(config := read_record(tmp_path / "config.yaml"))
    assert "${" in OmegaConf.to_container(config)["run"]["dir"]  # type: ignore[call-overload, index]


@pytest.mark.parametrize("units", ["${sizes.${size}}", "${sizes.${.size}}", "${oc.select:none,${sizes.small}}"])
def test_a_choice_by_another_key_is_read_unless_that_is_computed_too(units: str, tmp_path: Path) -> None:
    config = OmegaConf.create({"size": "small", "sizes": {"small": 16}, "model": {"units": units}})
    if ".size}" in units:
        with pytest.raises(ConfigError, match=r"model\.units=.*: refers to a key that is computed; write it out"):
            check_record(config)
        return
    check_record(config)
    assert config.model.units == 16


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
    found = record_of(config)
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
