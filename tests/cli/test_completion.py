"""The shell completes what is typed, set up as docs/index.md says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(kdist -sc install=bash)"
COMP_LINE=$TYPED COMP_POINT=${#TYPED} COMP_WORDS=($TYPED) 
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""
FISH = "kdist -sc install=fish | source; complete -C $TYPED"


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", FISH)])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kdist cluster=", {"cluster=NpsMw", "cluster=local"}),
        pytest.param("kdist recipe=mn", {"recipe=mnist", "recipe=mnist_mlp"}, marks=pytest.mark.long),
        pytest.param("kdist train recipe=mn", {"recipe=mnist", "recipe=mnist_mlp"}, marks=pytest.mark.long),
        ("kdist train cluster=2ps2w optimizer.learn", {"optimizer.learning_rate="}),
        ("kdist ex", {"export"}),
    ],
)
def test_a_shell_completes(shell: str, script: str, typed: str, offered: set[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "TYPED": typed, "HOME": str(tmp_path)}
    done = subprocess.run(
        [shell, "-c", script], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    )
    assert offered <= set(done.stdout.split())
