"""What every test shares: quiet TensorFlow, and a check that no task and no environment variable is left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
from helpers import tasks_running


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = dict(os.environ)
    yield
    left = tasks_running(under=os.getpid())
    assert not left, f"tasks still running: {left}"
    changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k) and k != "PYTEST_CURRENT_TEST"}
    assert not changed, f"environment changed: {changed}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
