"""A package of somebody else's adds a model, data, a hook, a strategy, a config group and a recipe."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, environment, result_of

pytestmark = pytest.mark.cluster

COMMAND = "hydra.searchpath=[pkg://theirs.conf] +recipe=theirs run.trust=[theirs] cluster=1ps2w"


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        (["cluster=local"], "single"),
        pytest.param(
            ["cluster=1ps2w", "strategy=sync_replicas", "+strategy.backup_workers=1"],
            "sync_replicas",
            marks=pytest.mark.long,
        ),
    ],
)
def test_kdists_groups_are_those_of_an_app_as_well(given: list[str], strategy: str, tmp_path: Path) -> None:
    """The one that the documentation shows."""
    page = (REPO / "docs" / "extending.md").read_text()
    for name in ("conf/app.yaml", "app.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        found = re.search(rf'title="{name}"\n(.*?)```', page, re.DOTALL)
        assert found is not None
        (tmp_path / name).write_text(found[1])
    done = subprocess.run(
        [sys.executable, "app.py", *given, "steps=20", "hydra.run.dir=D"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path / "D")
    assert (result["status"], result["global_step"], result["strategy"]) == ("done", 20, strategy)


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
    best = (tmp_path / "D" / "best-accuracy.txt").read_text().strip()
    assert float(best) == pytest.approx(result["best"]["accuracy"]["value"], abs=1e-3)
    lines = [line for line in done.stdout.splitlines() if line.startswith("top ")]
    assert lines[-1].endswith(f"/300 | accuracy {best}")
    assert all(line.startswith("top   | step    ") for line in lines)
    # Its walk-through says this very command.
    assert COMMAND in (REPO / "docs" / "extending.md").read_text()
