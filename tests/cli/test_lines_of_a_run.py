"""The lines that a script and a command write to the console and to logs, from the first one to the last."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import kdist
from helpers import environment

from kdist._compat.imports import LEVEL

pytestmark = pytest.mark.cluster

SCRIPT = """
import kdist
import keras
import numpy as np

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

if __name__ == "__main__":
    x = np.ones((32, 4), np.float32)
    kdist.Trainer(build, "1ps1w", run_dir="D").fit(x, x[:, :1], batch_size=8, epochs=2)
"""


@pytest.mark.long
def test_the_first_line_of_a_script_is_that_of_kdist(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    inherited = {name: value for name, value in environment().items() if name != LEVEL}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=inherited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=100, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "kdist 0.1.0 | mine | parameter_server on 1ps1w"
    assert [line.partition(" | ")[0] for line in lines[3:]] == ["save ", "epoch 1/2", "epoch 2/2", "save ", "done "]
    for task in ("ps", "worker"):
        log = (tmp_path / "D" / "logs" / f"{task}-0.log").read_text()
        assert re.fullmatch(rf"\S+Z {task}:0 serves at grpc://\S+\n", log), log


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["1ps1w", pytest.param("2w", marks=pytest.mark.long)])
def test_every_line_of_a_command_is_an_object(cluster: str, tmp_path: Path) -> None:
    model = ["model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]"]
    done = kdist(
        *model, f"cluster={cluster}", "train.steps=20", "hooks.logging.every_steps=10", "run.dir=D",
        "run.log_format=json", cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert {"start", "run_dir", "network", "save", "train", "valid", "done"} >= set(events)
    assert [events.count(event) for event in ("start", "train", "done")] == [1, 2, 1]
    logged = [json.loads(line)["event"] for line in (tmp_path / "D" / "logs" / "chief-0.log").read_text().splitlines()]
    assert logged == events


def test_a_port_for_metrics_that_is_taken_is_one_object_and_code_2(tmp_path: Path) -> None:
    model = ["model._target_=user_code.build", "data._target_=user_code.data", "run.trust=[user_code]"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = kdist(
            *model, "train.steps=20", f"run.metrics_port={port}", "run.log_format=json", cwd=tmp_path
        )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"].startswith(f"kdist: error: run.metrics_port={port}: 127.0.0.1:{port} cannot be")
