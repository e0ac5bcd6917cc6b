"""Runs whose run dir is a URL, on a real S3 server: trained, saved, resumed on another machine, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from commands import kdist as command
from helpers import REPO, objects_in, tags_of, toy_data

import kdist
from kdist.errors import ConfigError
from kdist.hooks import BestCheckpoint, CheckpointSaver
from kdist.run.checkpoint import Checkpoints
from kdist.run.metrics_file import rows_in

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared", "bucket")]

URL = "s3://bucket/runs/mine"


def train(steps: int, cluster: str = "2ps2w", **options: Any) -> kdist.Trainer:
    hooks = [CheckpointSaver(every_steps=20, keep=2), BestCheckpoint()]
    trainer = kdist.Trainer(models.mlp, cluster=cluster, run_dir=URL, hooks=hooks, **options)
    x, y = toy_data()
    trainer.fit(x, y, batch_size=32, steps=steps, validation_data=(x, y), validation_every_steps=steps, verbose=0)
    return trainer


def files_of(step: int, folder: str = "checkpoints") -> set[str]:
    return {f"{folder}/ckpt-{step}.index", f"{folder}/ckpt-{step}.data-00000-of-00001"}


OTHERS = {
    "best/checkpoint",
    "best/validation.json",
    "checkpoints/checkpoint",
    "logs/ps-0.log",
    "logs/ps-1.log",
    "logs/worker-0.log",
    "logs/worker-1.log",
    "metrics.csv",
    "model.keras",
    "placement.png",
    "placement.txt",
    "result.json",
    "tb/train/events.out.tfevents",
    "tb/validation/events.out.tfevents",
}


@pytest.mark.long
def test_a_run_is_resumed_on_another_machine(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(40)
    assert objects_in(bucket, "runs/mine/").keys() == OTHERS | files_of(20) | files_of(40) | files_of(40, "best")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    second = train(50, resume="must")
    assert second.run_dir != first.run_dir
    assert second.result.global_step == 50
    assert second.seed == first.seed
    found = objects_in(bucket, "runs/mine/")
    assert found.keys() == OTHERS | files_of(40) | files_of(50) | files_of(50, "best")
    assert json.loads(found["result.json"])["global_step"] == 50
    rows = rows_in(found["metrics.csv"], "metrics.csv")
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [8, 16, 24, 32, 40, 48, 50]
    # Both runs are in TensorBoard, which reads what it is given.
    bucket.download_file(
        next(each.key for each in bucket.objects.filter(Prefix="runs/mine/tb/validation")), str(tmp_path / "tfevents")
    )
    assert "epoch_loss" in tags_of(tmp_path / "tfevents")
    # What is in the bucket is what was trained.
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in files_of(50):
        (folder / Path(name).name).write_bytes(found[name])
    saved = Checkpoints(folder).read(50)
    assert saved is not None
    np.testing.assert_allclose(saved["parameters/dense/kernel"], second.model.layers[0].kernel.numpy(), rtol=1e-6)


@pytest.mark.long
def test_starting_over_sets_the_checkpoints_in_the_bucket_aside(bucket: Any) -> None:
    train(20, "local")
    train(5, "local", resume="never")
    names = objects_in(bucket, "runs/mine/").keys()
    assert files_of(20, "checkpoints-before-1") <= names
    assert files_of(5) <= names
    assert not files_of(20) & names


@pytest.mark.long
def test_a_second_fit_continues_from_the_model(bucket: Any) -> None:
    trainer = train(20, "local")
    x, y = toy_data()
    trainer.fit(x, y, batch_size=32, steps=30, validation_data=(x, y), verbose=0)
    assert trainer.result.global_step == 30
    found = objects_in(bucket, "runs/mine/")
    assert files_of(20) | files_of(30) <= found.keys()
    assert json.loads(found["result.json"])["global_step"] == 30


@pytest.mark.long
def test_the_chief_may_be_a_process_of_its_own(bucket: Any) -> None:
    trainer = train(20, "2w", strategy="multi_worker_mirrored")
    assert json.loads(objects_in(bucket, "runs/mine/")["result.json"])["status"] == "done"
    assert files_of(20) <= objects_in(bucket, "runs/mine/").keys()
    assert (trainer.run_dir / ".arrived").exists()


@pytest.mark.long
def test_the_command_line(bucket: Any, tmp_path: Path, secret: str) -> None:
    part = f"data.path={REPO / 'recipes' / 'mnist_part.npz'}"
    arguments = ["+recipe=mnist", "cluster=2ps2w", "train.steps=20", part, "run.dir=s3://bucket/mnist"]
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run dir   s3://bucket/mnist " in done.stdout
    found = objects_in(bucket, "mnist/")
    assert {".hydra/config.yaml", "logs/chief-0.log", "checkpoints/ckpt-20.index", "model.keras"} <= found.keys()
    assert json.loads(found["result.json"])["status"] == "done"
    assert not any(secret.encode() in content for content in found.values())
    assert not list(tmp_path.glob("s3*"))


@pytest.mark.long
def test_what_is_wrong_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    part = f"data.path={REPO / 'recipes' / 'mnist_part.npz'}"
    arguments = ["+recipe=mnist", "train.steps=20", part, "run.storage_timeout=1"]
    failed = command(*arguments, "run.dir=s3://no-such-bucket/run", cwd=tmp_path)
    assert failed.returncode == 2
    assert re.fullmatch(
        r"kdist: error: run\.dir=s3://no-such-bucket/run: there is no such bucket or object \(.*\)\n"
        r"  credentials and endpoint come from the environment: AWS_ACCESS_KEY_ID, .*\n",
        failed.stderr,
    )
    refused = command(*arguments, f"run.dir='s3://user:{secret}@bucket/run'", cwd=tmp_path)
    assert refused.returncode == 2
    assert "run.dir=s3://***: has a user, a query or a fragment" in refused.stderr
    assert secret not in refused.stderr + refused.stdout
    assert refused.stderr.count("\n") == 1
    with pytest.raises(ConfigError, match=r"run\.dir=s3://no-such-bucket/x: there is no such bucket"):
        kdist.Trainer(models.mlp, run_dir="s3://no-such-bucket/x").fit(*toy_data(), steps=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    message = r"s3://bucket/x: storage fails: EndpointConnectionError: .*http://127\.0\.0\.1:9/"
    with (
        pytest.warns(UserWarning, match=message + ".*; trying again for 3 s"),
        pytest.raises(ConfigError, match=r"run\.dir=" + message),
    ):
        kdist.Trainer(models.mlp, run_dir="s3://bucket/x", storage_timeout=3).fit(*toy_data(), steps=1)
