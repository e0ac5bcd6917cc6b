"""Sweeps whose folder is a URL: trials, table and picture are there, and any machine resumes them."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from commands import kdist as command
from helpers import objects_in, tasks_running, wait_until

pytestmark = pytest.mark.cluster

MINE = ["model._target_=user_code.build", "data._target_=user_code.keras_form", "run.trust=[user_code]"]
TRIAL = {
    ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "checkpoints/checkpoint",
    "checkpoints/ckpt-0.data-00000-of-00001", "checkpoints/ckpt-0.index", "checkpoints/ckpt-20.data-00000-of-00001",
    "checkpoints/ckpt-20.index", "logs/chief-0.log", "metrics.csv", "model.keras", "result.json",
    "tb/hparams/events.out.tfevents", "tb/train/events.out.tfevents", "tb/validation/events.out.tfevents", "trial.json",
}  # fmt: skip


@pytest.mark.long
def test_a_sweep_is_in_the_bucket_and_known_on_another_machine(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    sweep = ["-m", *MINE, "cluster=local", "optimizer.learning_rate=0.1,1e-6", "train.steps=20"]
    done = command(*sweep, "run.dir=s3://bucket/sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = objects_in(bucket, "sweep/")
    trials = {f"{number}/{name}" for number in (0, 1) for name in TRIAL}
    assert found.keys() == {"multirun.yaml", "sweep.txt", "sweep.png"} | trials
    assert json.loads(found["0/trial.json"])["status"] == json.loads(found["0/result.json"])["status"] == "done"
    table = found["sweep.txt"].decode()
    assert table in done.stdout
    assert "run dir   s3://bucket/sweep/1 " in done.stdout
    assert not any(secret.encode() in content for content in found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["one machine"]
    # Whoever runs it again sees the same, and other trials have no place there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    again = command(*sweep, "hydra.sweep.dir=s3://bucket/sweep/", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("already done; skipped") == 2
    assert table in again.stdout
    other = command("-m", *MINE, "train.steps=20,30", "run.dir=s3://bucket/sweep", cwd=tmp_path)
    assert other.returncode == 2
    assert "kdist: error: s3://bucket/sweep/0: holds a trial with" in other.stderr
    # What the sweeper writes for itself is of the last one.
    kept = {name: content for name, content in objects_in(bucket, "sweep/").items() if name[0] in "01"}
    assert kept == {name: content for name, content in found.items() if name in kept}
    assert not list(tmp_path.glob("s3*"))


@pytest.mark.long
def test_a_sweep_that_is_killed_goes_on_where_it_was_on_another_machine(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = [
        "-m", *MINE, "cluster=local", "train.steps=20,100000", "hooks.checkpoint.every_steps=100",
        "run.dir=s3://bucket/sweep",
    ]  # fmt: skip
    console = tmp_path / "console"
    console.touch()
    first = Command(*sweep, cwd=tmp_path, stdout=console)
    wait_until(lambda: re.search(r"save  \| step +[3-9]00 ", console.read_text()), 60, console.read_text)
    first.kill()
    first.wait(10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    again = Command(*sweep, cwd=tmp_path, stdout=console)
    wait_until(lambda: "load  | step" in console.read_text(), 60, console.read_text)
    again.kill()
    again.wait(10)
    said = console.read_text()
    assert said.count("already done; skipped") == 1
    assert int(said.partition("load  | step")[2].split()[0]) >= 300


@pytest.mark.long
def test_a_sweep_whose_storage_is_gone_ends_with_one_message(bucket: Any, tmp_path: Path) -> None:
    sweep = ["-m", *MINE, "cluster=local", "train.steps=100000,20", "hooks.checkpoint.every_steps=100"]
    stdout, stderr = tmp_path / "stdout", tmp_path / "stderr"
    stdout.touch()
    started = Command(*sweep, "run.dir=s3://bucket/sweep", cwd=tmp_path, stdout=stdout, stderr=stderr)
    wait_until(lambda: "save  | step" in stdout.read_text(), 60, stdout.read_text)
    bucket.objects.delete()
    bucket.delete()
    started.send_signal(signal.SIGTERM)
    code = started.wait(60)
    bucket.create()
    said = stderr.read_text()
    assert code == 1, said
    assert said.splitlines()[-1].startswith("kdist: error: s3://bucket/sweep: there is no such bucket")
    assert "Traceback" not in said
    assert "trial 1" not in stdout.read_text()


@pytest.mark.parametrize(
    ("plugin", "keys"),
    [
        pytest.param(
            "hydra/sweeper=optuna",
            ["optimizer.learning_rate=tag(log,interval(0.0001,1))", "hydra.sweeper.n_trials=2"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "hydra/launcher=joblib",
            ["optimizer.learning_rate=0.1,0.2", "hydra.launcher.n_jobs=2"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_plugins_of_hydra_sweep_to_a_url(plugin: str, keys: list[str], bucket: Any, tmp_path: Path) -> None:
    done = command(
        "-m", *MINE, "cluster=local", "train.steps=20", "run.dir=s3://bucket/sweep", plugin, *keys, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = objects_in(bucket, "sweep/")
    assert [json.loads(found[f"{number}/trial.json"])["status"] for number in (0, 1)] == ["done"] * 2
    assert ("optimization_results.yaml" in found) == ("optuna" in plugin)
    assert found["sweep.txt"].decode() in done.stdout
    assert not tasks_running(under=os.getpid())


@pytest.mark.long
def test_a_sweep_in_a_mounted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = f"file://{tmp_path}/mounted/sweep"
    done = command("-m", *MINE, "cluster=local", "train.steps=5,6", f"run.dir={place}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "mounted" / "sweep"
    assert {path.name for path in folder.iterdir()} == {"0", "1", "multirun.yaml", "sweep.txt", "sweep.png"}
    assert json.loads((folder / "1" / "result.json").read_text())["global_step"] == 6


def test_a_bucket_that_is_missing_is_one_message_and_nothing_is_started(bucket: Any, tmp_path: Path) -> None:
    sweep = ["-m", *MINE, "train.steps=1,2", "run.storage_timeout=1", "run.dir=s3://no-such-bucket/sweep"]
    refused = command(*sweep, cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("kdist: error: hydra.sweep.dir=s3://no-such-bucket/sweep: there is no such bucket")
    assert refused.stderr.count("\n") == 2
    assert not refused.stdout
    assert not list(tmp_path.iterdir())
