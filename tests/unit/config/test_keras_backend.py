"""Keras on another backend than TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SENTENCE = "=jax: kdist trains with Keras on TensorFlow; set KERAS_BACKEND=tensorflow before Keras is imported"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_command_ends_with_one_sentence() -> None:
    done = run("-m", "kdist", "+recipe=mnist", KERAS_BACKEND="jax")
    assert (done.returncode, done.stderr) == (2, f"kdist: error: KERAS_BACKEND{SENTENCE}\n")


@pytest.mark.parametrize("way", ["variable", "file"])
def test_a_program_is_told_when_it_imports_kdist(tmp_path: Path, way: str) -> None:
    file = tmp_path / "keras.json"
    file.write_text(json.dumps({"backend": "jax" if way == "file" else "tensorflow"}))
    variables = {"KERAS_HOME": str(tmp_path)} | ({"KERAS_BACKEND": "jax"} if way == "variable" else {})
    done = run("-c", "import kdist", **variables)
    where = "KERAS_BACKEND" if way == "variable" else f"{file}: backend"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"kdist.errors.ConfigError: {where}{SENTENCE}"


def test_tensorflow_is_the_default_and_a_variable_counts_more_than_the_file(tmp_path: Path) -> None:
    assert run("-c", "import kdist", KERAS_HOME=str(tmp_path)).returncode == 0
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    assert run("-c", "import kdist", KERAS_HOME=str(tmp_path), KERAS_BACKEND="tensorflow").returncode == 0
