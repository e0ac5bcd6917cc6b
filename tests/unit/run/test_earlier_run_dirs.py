"""A run dir that kdist 0.1.0 has left is locked, read and resumed.

`run_dir_0_1_0/` is that of a run in one process with checkpoints of steps 8 and 12, whose next chief was killed on
another machine: its lock is still there.
"""

from __future__ import annotations

import csv
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
from fakes import ended_process, held_by
from helpers import toy_data

import kdist
from kdist.errors import ConfigError
from kdist.hooks import CheckpointSaver
from kdist.storage import lock

LEFT = Path(__file__).with_name("run_dir_0_1_0")


@pytest.fixture
def run_dir(run_dir: Path) -> Path:
    shutil.copytree(LEFT, run_dir)
    return run_dir


def resume(run_dir: Path) -> kdist.Trainer:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, resume="must", hooks=[CheckpointSaver(every_steps=8, keep=9)])
    x, y = toy_data()
    trainer.fit(x, y, batch_size=32, steps=20, validation_data=(x, y), verbose=0)
    return trainer


@pytest.mark.parametrize("owner", ["silent elsewhere", "ended here"])
def test_it_is_resumed_when_its_chief_is_gone(run_dir: Path, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if owner == "ended here":
        (run_dir / ".lock").write_text(held_by(pid=ended_process()))
    else:
        # The minute of silence passes at once.
        seconds = itertools.count(step=30)
        monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    earlier = json.loads((LEFT / "result.json").read_text())
    result = resume(run_dir).result
    assert (result.status, result.global_step, result.gradients.applied) == ("done", 20, 8)
    # Its seed and its best values go on, and so do its metrics.
    assert result.seed == earlier["seed"]
    assert result.best["loss"]["value"] < earlier["best"]["loss"]["value"]
    rows = [tuple(row) for row in csv.reader((run_dir / "metrics.csv").open())]
    before = [tuple(row) for row in csv.reader((LEFT / "metrics.csv").open())]
    assert rows[: len(before)] == before
    assert rows[-1][:3] == ("20", "2", "epoch")
    assert not (run_dir / ".lock").exists()
    assert {path.stem for path in (run_dir / "checkpoints").glob("*.index")} == {
        f"ckpt-{step}" for step in (8, 12, 16, 20)
    }


def test_it_is_refused_while_its_chief_has_a_heartbeat(run_dir: Path) -> None:
    (run_dir / ".lock").write_text(held_by())
    with pytest.raises(ConfigError, match=rf"run\.dir={run_dir}: is in use by this process itself"):
        resume(run_dir)


def test_it_is_a_row_among_runs(run_dir: Path) -> None:
    runs = kdist.load_runs(run_dir)
    row = dict(runs.iloc[0])
    assert (row["status"], row["strategy"], row["cluster"], row["global_step"]) == ("done", "single", "local", 12)
    assert row["best/loss"] == pytest.approx(1.4434515)
