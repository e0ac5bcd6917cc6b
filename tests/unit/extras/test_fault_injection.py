"""Drills without a cluster: when they act, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import ValuesHere, make_session, run_all

from kdist.errors import ConfigError
from kdist.extras.faults import DamageCheckpoint, Drill, FillDisk, SignalTask, SlowTask
from kdist.hooks import StopAtStep
from kdist.run.checkpoint import Checkpoints


class Noted(Drill):
    def __init__(self, at_step: int) -> None:
        super().__init__(at_step)
        self.steps: list[int] = []

    def inject(self, session: Any) -> str:
        self.steps.append(session.global_step)
        return "noted"


def test_a_drill_acts_once_at_its_step() -> None:
    drill = Noted(37)
    run_all(make_session([drill, StopAtStep(last_step=100)]))
    assert drill.steps == [37]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SignalTask(0, "worker:1"), r"drill\.at_step=0"),
        (lambda: SignalTask(1, "worker:1", "HUP"), r"drill\.number=HUP: choose one of KILL, STOP"),
        (lambda: SlowTask(1, "worker:1", 1.0), r"drill\.factor=1\.0: must be more than 1"),
    ],
)
def test_what_cannot_be_done_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_task_that_is_not_there_is_refused_with_those_that_are() -> None:
    session = SimpleNamespace(strategy=SimpleNamespace(pids={"ps:0": 1, "worker:0": 2}))
    with pytest.raises(ConfigError, match=r"drill\.task=worker:7: there is no such task .* there are ps:0, worker:0"):
        SignalTask(1, "worker:7").inject(session)  # type: ignore[arg-type]


def test_a_large_file_system_is_not_filled(tmp_path: Path) -> None:
    session = SimpleNamespace(checkpoints=Checkpoints(tmp_path / "checkpoints"))
    with pytest.raises(ConfigError, match=r"drill\.max_bytes=1000: \d+ bytes are free"):
        FillDisk(1, max_bytes=1000).inject(session)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    values = {"global_step": np.array(5), "parameters/kernel": np.ones((100, 100), np.float32)}
    checkpoints.write(4, ValuesHere(values), keep=2)
    checkpoints.write(5, ValuesHere(values), keep=2)
    DamageCheckpoint(1).inject(SimpleNamespace(checkpoints=checkpoints, global_step=5))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="ckpt-5 is damaged"):
        restored = checkpoints.restore(ValuesHere(values))
    assert restored is not None
    assert restored.name == "ckpt-4"
