"""A run is run again from its record, and one key says where a run writes."""

from __future__ import annotations

from pathlib import Path

import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from helpers import result_of

from kdist.cli import main

RUN = ["+recipe=linear", "train.steps=20", "run.seed=3", "run.verbose=0"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kdist.fit.signals.exit_at_once", None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def train(*arguments: str) -> None:
    assert main.run([*RUN, *arguments]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that refuses a command, which leaves nothing behind."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert main.run(list(arguments)) == 2
    assert sorted(Path().rglob("*")) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


def only_run(pattern: str) -> Path:
    (found,) = Path().glob(f"{pattern}/result.json")
    return found.parent


def test_a_run_is_run_again_with_changes() -> None:
    train("run.dir=first", "optimizer=adam", "optimizer.learning_rate=0.01")
    assert main.run(["train", "--again", "first"]) == 0
    again = only_run("runs/linear/*")
    assert result_of(again)["metrics"] == result_of(Path("first"))["metrics"]
    assert "optimizer.learning_rate=0.01" in result_of(again)["overrides"]
    # What is not changed stays, also of a record that was made from another one; an option replaces its group.
    assert main.run([f"--again={again}", "train.steps=30", "optimizer=sgd", "run.dir=other"]) == 0
    other = result_of(Path("other"))
    assert other["overrides"] == [
        "+recipe=linear",
        "run.seed=3",
        "run.verbose=0",
        "train.steps=30",
        "optimizer=sgd",
        "run.dir=other",
    ]
    assert (other["global_step"], other["config"]["optimizer"]["name"], other["seed"]) == (30, "sgd", 3)
    assert other["config"]["optimizer"]["learning_rate"] != 0.01


def test_the_record_may_be_named_as_hydra_does() -> None:
    train("run.dir=first")
    assert main.run(["--config-path", str(Path("first/.hydra").absolute()), "--config-name", "config"]) == 0
    assert result_of(only_run("runs/linear/*"))["metrics"] == result_of(Path("first"))["metrics"]


def test_a_sweep_around_a_run() -> None:
    train("run.dir=first")
    assert main.run(["-m", "--again", "first", "train.steps=5,10", "run.dir=sweep"]) == 0
    assert [result_of(Path("sweep", number))["global_step"] for number in "01"] == [5, 10]


def test_what_cannot_be_run_again_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken/.hydra").mkdir(parents=True)
    Path("broken/.hydra/config.yaml").write_text("train: [", encoding="utf-8")
    Path("mine.yaml").write_text("train: {steps: 5}\n", encoding="utf-8")
    assert "--again nowhere: has no .hydra/config.yaml" in refused(capsys, "--again", "nowhere")
    assert "--again broken: " in refused(capsys, "--again", "broken")
    assert "--again: needs the run dir" in refused(capsys, "--again")
    assert "--again: needs the run dir" in refused(capsys, "--again", "-m")
    assert "leave --config-name=mine out" in refused(capsys, "--again", "broken", "--config-name", "mine")
    here = ["--config-path", str(Path.cwd()), "--config-name", "mine"]
    for command in (here, ["-m", *here, "train.steps=1,2"]):
        assert "--config-name=mine is not one of kdist's: the first of its defaults" in refused(capsys, *command)


def test_one_key_says_where_a_run_writes(capsys: pytest.CaptureFixture[str]) -> None:
    # So people turn off the folder that Hydra makes.
    train("run.dir=mine", "hydra.run.dir=.", "hydra.output_subdir=null")
    assert result_of(Path("mine"))["config"]["run"]["dir"] == "mine"
    train("hydra.run.dir=.", "hydra.output_subdir=null")
    assert only_run("runs/linear/*")
    train("hydra.run.dir=outputs/1")
    assert result_of(Path("outputs/1"))["config"]["run"]["dir"] == "outputs/1"
    assert {path.name for path in Path().iterdir()} == {"mine", "runs", "outputs"}
    line = refused(capsys, *RUN, "run.dir=mine", "hydra.run.dir=yours")
    assert line.endswith(
        "hydra.run.dir=yours: contradicts run.dir=mine, which says where a run writes; leave hydra.run.dir out"
    )
