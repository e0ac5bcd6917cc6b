"""Processes without the names that only Linux has: what kdist does on macOS, as far as Linux can show it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import as_on_macos, result_of, wait_until

PROGRAM = """
import kdist, keras, numpy as np

def build_model():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model

trainer = kdist.Trainer(build_model, cluster="{cluster}", run_dir="run")
trainer.fit(np.ones((64, 6)), np.ones((64, 3)), batch_size=8, steps={steps})
"""
ENDLESS = 10**9


@contextmanager
def program(cluster: str, steps: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "processes").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(cluster=cluster, steps=steps)],
        cwd=folder,
        env=as_on_macos(folder / "processes"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as chief:
        try:
            yield chief
        finally:
            chief.kill()


def left(folder: Path) -> list[str]:
    """The numbers of the processes that run still."""
    return [path.name for path in (folder / "processes").iterdir() if Path("/proc", path.name).exists()]


@pytest.mark.cluster
@pytest.mark.parametrize("cluster", ["1ps1w", pytest.param("2w", marks=pytest.mark.long)])
def test_a_local_cluster_trains_and_ends(cluster: str, tmp_path: Path) -> None:
    with program(cluster, 20, tmp_path) as chief:
        _, errors = chief.communicate(timeout=120)
    assert (chief.returncode, errors) == (0, "")
    assert len(list((tmp_path / "processes").iterdir())) >= 3
    assert left(tmp_path) == []
    assert result_of(tmp_path / "run")["status"] == "done"
    assert result_of(tmp_path / "run")["global_step"] == 20


@pytest.mark.cluster
@pytest.mark.long
def test_tasks_end_with_a_chief_that_is_killed(tmp_path: Path) -> None:
    with program("1ps1w", ENDLESS, tmp_path) as chief:
        wait_until((tmp_path / "run" / "checkpoints" / "ckpt-0.index").exists, 60, "it trains")
        chief.kill()
    wait_until(lambda: not left(tmp_path), 10, lambda: f"{left(tmp_path)} have ended")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("cluster.isolate=must", "no private network namespace here: only Linux has private ones"),
        ("cluster.bind=en0", "works on Linux only"),
    ],
)
def test_what_only_linux_can_do_is_refused(key: str, reason: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdist", "+recipe=mnist", "cluster=1ps1w", key]
    done = subprocess.run(command, cwd=tmp_path, env=as_on_macos(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kdist: error: {key}: {reason}\n")
