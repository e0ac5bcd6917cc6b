"""A package of somebody else's adds a model, data, a hook, a strategy, a config group and a recipe."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, environment, result_of

pytestmark = pytest.mark.cluster

COMMAND = "hydra.searchpath=[pkg://theirs.conf] +recipe=theirs run.trust=[theirs] cluster=1ps2w"


@pytest.mark.long
def test_a_package_extends_kdist_without_a_change_in_it(tmp_path: Path) -> None:
    source, site = tmp_path / "plugin", tmp_path / "site"
    shutil.copytree(REPO / "tests" / "plugin", source)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(source)], check=True, timeout=100, capture_output=True)
    env = environment()
    env["PYTHONPATH"] = f"{site}:{env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "kdist", *COMMAND.split(), "run.dir=D", "train.steps=300", "size=large"],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = result_of(tmp_path / "D")
    assert (result["status"], result["global_step"], result["strategy"]) == ("done", 300, "parameter_server")
    assert result["metrics"]["validation"]["accuracy"] > 0.8
    best = float((tmp_path / "D" / "best-accuracy.txt").read_text())
    assert best == pytest.approx(result["best"]["accuracy"]["value"], abs=1e-3)
    # Its walk-through says this very command.
    assert COMMAND in (REPO / "docs" / "extending.md").read_text()
