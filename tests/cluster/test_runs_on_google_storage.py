"""Runs at gs:// URLs, on an emulator of Google Cloud Storage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
from commands import kdist as command
from gcp_storage_emulator.server import create_server
from helpers import REPO, free_addresses, toy_data

import kdist
from kdist.errors import ConfigError
from kdist.hooks import CheckpointSaver
from kdist.storage.object_storage import ObjectStorage

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared", "server")]

URL = "gs://bucket/runs/mine"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A server with an empty bucket, which kdist finds by the environment."""
    host, _, port = free_addresses(1)[0].partition(":")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    # Nobody is asked for credentials.
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one machine"))
    with create_server(host, int(port), in_memory=True, default_bucket="bucket"):
        yield


def train(steps: int, cluster: str = "2ps2w", **options: str) -> kdist.Trainer:
    hooks = [CheckpointSaver(every_steps=20, keep=2)]
    trainer = kdist.Trainer(models.mlp, cluster=cluster, run_dir=URL, hooks=hooks, **options)
    x, y = toy_data()
    trainer.fit(x, y, batch_size=32, steps=steps, validation_data=(x, y), verbose=0)
    return trainer


def names(url: str = URL) -> set[str]:
    return set(ObjectStorage(url, 1.0).sizes())


def files_of(step: int) -> set[str]:
    return {f"checkpoints/ckpt-{step}.index", f"checkpoints/ckpt-{step}.data-00000-of-00001"}


@pytest.mark.long
def test_a_run_is_resumed_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(40)
    assert files_of(20) | files_of(40) | {"result.json", "model.keras", "logs/ps-0.log"} <= names()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    second = train(50, "local", resume="must")
    assert second.run_dir != first.run_dir
    assert (second.result.global_step, second.seed) == (50, first.seed)
    assert names() >= files_of(40) | files_of(50)
    assert not names() & (files_of(20) | {".lock"})
    assert json.loads(ObjectStorage(URL, 1.0).read("result.json") or b"")["global_step"] == 50


@pytest.mark.long
def test_starting_over_sets_checkpoints_in_the_bucket_aside() -> None:
    train(20, "local")
    train(5, "local", resume="never")
    assert files_of(5) | {name.replace("/", "-before-1/", 1) for name in files_of(20)} <= names()
    assert not files_of(20) & names()


@pytest.mark.long
def test_the_command_line(tmp_path: Path) -> None:
    part = f"data.path={REPO / 'recipes' / 'mnist_part.npz'}"
    arguments = ["+recipe=mnist", "cluster=local", part, "run.dir=gs://bucket/mnist"]
    for steps, said in ((20, "save  | step     20"), (30, "load  | step     20")):
        done = command(*arguments, f"train.steps={steps}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert not done.stderr
    assert {".hydra/config.yaml", "logs/chief-0.log", "checkpoints/ckpt-30.index", "model.keras"} <= names(
        "gs://bucket/mnist"
    )


def test_a_large_object_arrives_as_it_is(tmp_path: Path) -> None:
    # It travels in several pieces.
    content = bytes(range(256)) * (1 << 18)
    (tmp_path / "large").write_bytes(content)
    storage = ObjectStorage(URL, 1.0, tmp_path)
    storage.publish(["large"])
    (tmp_path / "large").unlink()
    storage.fetch(["large"])
    assert storage.sizes() == {"large": len(content)}
    assert (tmp_path / "large").read_bytes() == content


def test_a_bucket_that_is_missing_is_a_wrong_run_dir() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir=gs://no-such-bucket/x: there is no such bucket"):
        kdist.Trainer(models.mlp, run_dir="gs://no-such-bucket/x").fit(*toy_data(), steps=1)


@pytest.mark.long
def test_a_server_that_is_gone_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_addresses(1)[0]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{address}")
    refused = command("+recipe=mnist", "run.dir=gs://bucket/mnist", "run.storage_timeout=1", cwd=tmp_path)
    assert refused.returncode == 2
    # Nothing of what the library logs.
    assert re.fullmatch(
        rf"kdist: error: run\.dir=gs://bucket/mnist: storage fails: ClientConnectorError: .* {address} .*\n"
        r"  credentials and endpoint come from the environment: .*\n",
        refused.stderr,
    ), refused.stderr
