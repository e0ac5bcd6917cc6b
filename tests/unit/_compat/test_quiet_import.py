"""The import of TensorFlow says what `TF_CPP_MIN_LOG_LEVEL` allows, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kdist._compat import quiet_import

# As TensorFlow 2.21 and 2.16 write them.
MESSAGES = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795616183.564936   16347 port.cc:153] oneDNN custom operations are on.",
    "2026-11-25 14:16:31.376231: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.",
    "To enable the following instructions: AVX2, in other operations, rebuild TensorFlow.",
    "W0000 00:00:1795616183.564936   16347 gpu.cc:1] a warning",
    "E0000 00:00:1795616183.564936   16347 server.cc:1] an error",
    "F0000 00:00:1795616183.564936   16347 cpu.cc:1] The TensorFlow library was compiled to use AVX instructions",
    "what another library says",
]
FAKE = f"""
import os
os.write(2, {chr(10).join(MESSAGES)!r}.encode() + b"\\n")
print("level", os.environ.get("TF_CPP_MIN_LOG_LEVEL"), flush=True)
if "ABORTS" in os.environ:
    os.abort()
class config:
    list_physical_devices = staticmethod(lambda kind: os.write(2, b"E0000 00:00:1 2 c.cc:5] failed call to cuInit\\n"))
"""


def run(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "tensorflow").mkdir(exist_ok=True)
    (folder / "tensorflow" / "__init__.py").write_text(FAKE)
    inherited = {name: value for name, value in os.environ.items() if name != quiet_import.LEVEL}
    inherited["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("level", "shown"), [("0", "WITEF"), ("1", "WEF"), ("2", "EF"), ("3", "F")])
def test_the_level_counts_from_the_first_message_on(level: str, shown: str, tmp_path: Path) -> None:
    done = run("import kdist, tensorflow", tmp_path, TF_CPP_MIN_LOG_LEVEL=level)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    expected = MESSAGES if level == "0" else [line for line in MESSAGES[4:] if line[0] in shown or line == MESSAGES[-1]]
    assert lines == expected
    assert done.stdout == f"level {level}\n"


def test_a_level_that_was_not_given_is_not_left_behind(tmp_path: Path) -> None:
    done = run("import kdist, tensorflow, os; print(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))", tmp_path)
    assert done.stdout == f"level {quiet_import.default_level()}\nNone\n"


def test_what_tensorflow_says_before_it_aborts_is_shown(tmp_path: Path) -> None:
    done = run("import kdist, tensorflow", tmp_path, ABORTS="1")
    assert done.returncode < 0
    assert MESSAGES[-2] in done.stderr.splitlines()


def test_tensorflow_that_was_imported_before_is_left_alone(tmp_path: Path) -> None:
    done = run("import tensorflow, kdist", tmp_path)
    assert done.stderr.splitlines() == MESSAGES
    assert done.stdout == "level None\n"


def test_the_real_import_says_nothing_and_nothing_of_a_home_that_is_missing() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in (quiet_import.LEVEL, "MPLCONFIGDIR")
    }
    # root may write in a directory that is read-only.
    environment |= {"HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null/config", "XDG_CACHE_HOME": "/dev/null/cache"}
    program = "import kdist, keras, tensorflow as tf; print(tf.config.list_physical_devices('CPU') != [])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
