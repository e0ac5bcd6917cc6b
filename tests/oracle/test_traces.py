"""The number of times that a model's step is traced: as often as by Keras, or less."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import kdist


class Traced(keras.layers.Layer):
    """Notes in a file, of whatever process, that it is traced."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def call(self, inputs: Any) -> Any:
        with open(self.file, "a") as notes:
            print(os.getpid(), file=notes)
        return inputs


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def build(file: Path, kind: type[keras.Model], *, has_table: bool = False) -> keras.Model:
    inputs = keras.Input((3,))
    vectors = keras.layers.Flatten()(keras.layers.Embedding(10, 2)(inputs)) if has_table else inputs
    model = kind(inputs, keras.layers.Dense(1)(Traced(str(file))(vectors)))
    model.compile("adam", "mse", metrics=["mae"])
    # Keras has called the layers to find the shapes of their outputs.
    file.unlink()
    return model


def traces(file: Path) -> Counter[str]:
    return Counter(file.read_text().split())


def train(file: Path, kind: type[keras.Model], run_dir: Path, *, has_table: bool = False, **arguments: Any) -> None:
    trainer = kdist.Trainer(lambda: build(file, kind, has_table=has_table), run_dir=run_dir, **arguments)
    trainer.fit(np.ones((60, 3), np.float32), np.ones((60, 1)), batch_size=8, epochs=2, verbose=0)


@pytest.mark.parametrize(
    ("kind", "has_table"),
    [(keras.Model, False), pytest.param(keras.Model, True, marks=pytest.mark.long), (OwnStep, False)],
    ids=["Keras", "table", "own"],
)
def test_a_step_is_traced_once_in_one_process(kind: Any, has_table: bool, run_dir: Path) -> None:
    train(run_dir.with_name("traces"), kind, run_dir, has_table=has_table)
    assert traces(run_dir.with_name("traces")) == {str(os.getpid()): 1}


@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("sync_replicas", marks=pytest.mark.long)])
def test_the_chief_of_parameter_servers_traces_a_step_once_and_no_task_does(strategy: str, run_dir: Path) -> None:
    train(run_dir.with_name("traces"), OwnStep, run_dir, cluster="1ps2w", strategy=strategy)
    assert traces(run_dir.with_name("traces")) == {str(os.getpid()): 1}


SCRIPT = """
import sys
import keras, numpy as np
import kdist

def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

for _ in range(2):
    trainer = kdist.Trainer(build, "1ps1w", run_dir=sys.argv[1], resume="never")
    trainer.fit(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
"""


@pytest.mark.long
@pytest.mark.cluster
def test_a_step_that_was_traced_before_its_cluster_began_makes_no_error_of_tensorflow(run_dir: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, "-c", SCRIPT, str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "remove function" not in done.stderr
