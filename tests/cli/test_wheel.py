"""The package as a user installs it: a wheel of a clean clone, in a virtual environment and a folder of their own."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from helpers import REPO

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_wheel_of_a_clean_clone_trains_mnist_in_an_empty_folder(tmp_path: Path) -> None:
    def run(*command: str | Path, cwd: Path, timeout: float = 600) -> str:
        # Nothing of the tests' own environment may help.
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    clone, folder = tmp_path / "clone", tmp_path / "folder"
    folder.mkdir()
    run("git", "clone", "--quiet", REPO, clone, cwd=tmp_path)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, clone, cwd=tmp_path)
    (wheel,) = tmp_path.glob("kdist-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, cwd=folder)

    printed = run(python, "-m", "kdist", "+recipe=mnist", "cluster=2ps2w", cwd=folder)

    assert "parameter_server on 2ps2w" in printed
    (result,) = folder.glob("runs/mnist/*/result.json")
    record = json.loads(result.read_text())
    assert (record["status"], record["global_step"]) == ("done", 2000)
    assert record["metrics"]["validation"]["accuracy"] > 0.95
    found = run(python, "-m", "kdist.evaluate", result.parent, "--json", cwd=folder)
    assert json.loads(found)["metrics"] == pytest.approx(record["metrics"]["validation"], rel=1e-5)
    # Everything that a run leaves is in its run dir.
    assert {path.name for path in folder.iterdir()} <= {"runs", "data"}
