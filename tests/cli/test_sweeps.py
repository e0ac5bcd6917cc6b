"""Sweeps by the command line: grids, resumed ones, and those of Hydra's plugins."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf  # noqa: F401 - it changes the environment, which no test may do
from commands import Command, kdist
from helpers import result_of, tasks_running, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from kdist.sweeps.load import runs_below

pytestmark = pytest.mark.cluster

MINE = ["model._target_=user_code.build", "data._target_=user_code.keras_form", "run.trust=[user_code]"]
PNG = b"\x89PNG\r\n\x1a\n"


def rows(console: str) -> list[list[str]]:
    """The cells of the table at the end, without its head."""
    _, _, table = console.partition("\nsweep | ")
    lines = [line for line in table.splitlines() if "|" in line and not line.startswith("trial ")]
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


def hparams_of_row(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """The name of a row in TensorBoard's HParams tab, and what it has."""
    events = EventAccumulator(str(run_dir / "tb" / "hparams")).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    return start.group_name, {name: getattr(v, v.WhichOneof("kind")) for name, v in start.hparams.items()}


@pytest.mark.long
def test_a_grid_runs_each_job_on_its_own_cluster_and_once(tmp_path: Path) -> None:
    command = [
        "-m",
        *MINE,
        "cluster=local,1ps1w",
        "optimizer.learning_rate=0.1,1e-6",
        "train.steps=30",
        "hydra.sweep.dir=S",
    ]
    done = kdist(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "S"
    assert [folder.stat().st_mode & 0o777 for folder in (sweep, sweep / "0", sweep / "3")] == [0o700] * 3
    assert [result_of(sweep / str(number))["cluster"] for number in range(4)] == ["local", "local", "1ps1w", "1ps1w"]
    assert not tasks_running(under=os.getpid())
    table = rows(done.stdout)
    assert [float(row[-1]) for row in table] == [0.1, 0.1, 1e-6, 1e-6]
    losses = [float(row[3]) for row in table]
    assert losses == sorted(losses)
    assert (sweep / "sweep.png").read_bytes().startswith(PNG)
    assert "tensorboard --logdir S" in done.stdout
    runs = runs_below(sweep)
    assert [(row["run"], row["cluster"], row["optimizer.learning_rate"]) for row in runs.rows] == [
        ("0", "local", 0.1), ("1", "local", 1e-6), ("2", "1ps1w", 0.1), ("3", "1ps1w", 1e-6),
    ]  # fmt: skip
    assert hparams_of_row(sweep / "3") == (
        "3 in S",
        {
            "model._target_": "user_code.build", "data._target_": "user_code.keras_form", "train.batch_size": 32,
            "strategy": "parameter_server", "cluster": "1ps1w", "optimizer.learning_rate": 1e-6, "train.steps": 30,
        },
    )  # fmt: skip
    # Again: nothing is left to do.
    written = [(sweep / str(number) / "result.json").stat().st_mtime_ns for number in range(4)]
    again = kdist(*command, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already done; skipped") == 4
    assert rows(again.stdout) == table
    assert [(sweep / str(number) / "result.json").stat().st_mtime_ns for number in range(4)] == written
    # Another sweep has no place there.
    other = kdist("-m", *MINE, "optimizer.learning_rate=0.2,0.3", "train.steps=30", "hydra.sweep.dir=S", cwd=tmp_path)
    assert other.returncode == 2
    assert "holds a trial with" in other.stderr
    assert [(sweep / str(number) / "result.json").stat().st_mtime_ns for number in range(4)] == written


def test_a_failed_job_does_not_end_a_sweep_and_no_secret_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["-m", *MINE, "data._target_=user_code.data", "+data.scale=1e38,1", "train.steps=20", "hydra.sweep.dir=S"]
    monkeypatch.setenv("DATABASE_PASSWORD", "correct-horse")
    done = kdist(*command, "+data.password=${oc.env:DATABASE_PASSWORD}", cwd=tmp_path)
    assert done.returncode == 1
    assert "kdist: error: 1 of 2 trials failed: 0" in done.stderr
    assert [row[0] for row in rows(done.stdout)] == ["done", "failed"]
    assert "trial 0 failed: NanTensor: " in done.stdout
    assert json.loads((tmp_path / "S" / "0" / "trial.json").read_text())["status"] == "failed"
    assert "correct-horse" not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "S").rglob("*") if path.is_file()]
    assert not [path for path in files if b"correct-horse" in path.read_bytes()]


def test_a_wrong_metric_ends_a_sweep_after_its_first_job(tmp_path: Path) -> None:
    command = ["-m", *MINE, "cluster=local", "optimizer.learning_rate=0.1,0.2", "train.steps=5", "hydra.sweep.dir=S"]
    done = kdist(*command, "sweep.metric=auc", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("kdist: error: sweep.metric=auc: a run reports loss, ") == 1
    assert (tmp_path / "S" / "0" / "result.json").exists()
    assert not (tmp_path / "S" / "1" / "result.json").exists()


@pytest.mark.long
def test_a_sweep_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [
        "-m", *MINE, "cluster=local", "train.steps=20,100000", "hooks.checkpoint.every_steps=100", "hydra.sweep.dir=S",
    ]  # fmt: skip
    console = tmp_path / "console"
    console.touch()
    sweep = Command(*command, cwd=tmp_path, stdout=console)
    checkpoints = tmp_path / "S" / "1" / "checkpoints"
    wait_until((checkpoints / "ckpt-300.index").exists, 60, "the second job has saved")
    sweep.kill()
    sweep.wait(10)
    assert result_of(tmp_path / "S" / "0")["status"] == "done"
    again = Command(*command, cwd=tmp_path, stdout=console)
    wait_until(lambda: "load  | step" in console.read_text(), 60, "the second job goes on")
    again.kill()
    again.wait(10)
    said = console.read_text()
    assert said.count("already done; skipped") == 1
    assert int(said.partition("load  | step")[2].split()[0]) >= 300


@pytest.mark.long
@pytest.mark.parametrize(
    ("plugin", "keys"),
    [
        (
            "hydra/sweeper=optuna",
            [
                "optimizer.learning_rate=tag(log,interval(0.0001,1))", "hydra.sweeper.n_trials=3",
                "hydra.sweeper.sampler.seed=1",
            ],
        ),
        pytest.param(
            "hydra/launcher=joblib",
            ["optimizer.learning_rate=0.1,0.2", "hydra.launcher.n_jobs=2"],
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_plugins_of_hydra_sweep(plugin: str, keys: list[str], tmp_path: Path) -> None:
    done = kdist("-m", *MINE, "cluster=local", "train.steps=20", "hydra.sweep.dir=S", plugin, *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert [row[0] for row in table] == ["done"] * (3 if "optuna" in plugin else 2)
    assert not tasks_running(under=os.getpid())
