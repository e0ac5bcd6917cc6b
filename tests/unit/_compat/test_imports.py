"""TensorFlow is imported without needless messages, without looking for garbage, and for tasks without Keras."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from kdist._compat import imports
from kdist._compat.imports import quick_import

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
    inherited = {name: value for name, value in os.environ.items() if name != imports.LEVEL}
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
    assert done.stdout == f"level {'1' if imports.has_gpu() else '3'}\nNone\n"


def test_what_tensorflow_says_before_it_aborts_is_shown(tmp_path: Path) -> None:
    done = run("import kdist, tensorflow", tmp_path, ABORTS="1")
    assert done.returncode < 0
    assert MESSAGES[-2] in done.stderr.splitlines()


def test_tensorflow_that_was_imported_before_is_left_alone(tmp_path: Path) -> None:
    done = run("import tensorflow, kdist", tmp_path)
    assert done.stderr.splitlines() == MESSAGES
    assert done.stdout == "level None\n"


def test_the_real_import_says_nothing_and_nothing_of_a_home_that_is_missing() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (imports.LEVEL, "MPLCONFIGDIR")}
    # root may write in a directory that is read-only.
    environment |= {"HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null/config", "XDG_CACHE_HOME": "/dev/null/cache"}
    program = "import kdist, keras, tensorflow as tf; print(tf.config.list_physical_devices('CPU') != [])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_nobody_looks_for_garbage_meanwhile() -> None:
    with quick_import():
        assert not gc.isenabled()
        with quick_import():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_goes_wrong_goes_on_and_leaves_everything_as_it_was() -> None:
    with pytest.raises(ImportError, match="no such"), quick_import():
        raise ImportError("no such module")
    assert gc.isenabled()


@pytest.mark.long
@pytest.mark.parametrize(("keras", "found"), [(True, "True"), (False, "False")])
def test_keras_is_imported_only_if_it_is_wanted_and_stays_importable(keras: bool, found: str) -> None:
    program = f"""
import sys
from kdist._compat.imports import quick_import
with quick_import(keras={keras}):
    import tensorflow as tf
print("keras" in sys.modules, tf.distribute.Server.__name__)
import keras
print(keras.backend.backend())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines()[-2:] == [f"{found} Server", "tensorflow"]


def test_keras_that_is_there_already_stays() -> None:
    with quick_import(keras=False):
        assert sys.modules["keras"] is keras
    assert sys.modules["keras"] is keras


@pytest.mark.parametrize("of_user", [None, "false"])
def test_processes_share_a_gpu_unless_the_user_has_said_otherwise(of_user: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TF_FORCE_GPU_ALLOW_GROWTH"}
    if of_user is not None:
        environment["TF_FORCE_GPU_ALLOW_GROWTH"] = of_user
    code = "import os, kdist; print(os.environ['TF_FORCE_GPU_ALLOW_GROWTH'])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [of_user or "true"]
