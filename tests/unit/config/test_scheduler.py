"""The scheduler that started a process, as the process knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist.config.scheduler import folder_of_step, grace_secs_of
from kdist.run.run_dir import RunDir

BATCH = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "ENVIRONMENT": "BATCH"}
TASK = {**BATCH, "SLURM_STEP_NUM_TASKS": "5"}


def test_schedulers_leave_less_time_to_save() -> None:
    assert grace_secs_of(None, {}) == 30
    assert grace_secs_of(None, {"SLURM_JOB_ID": "7"}) == 20
    assert grace_secs_of(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == 20
    assert grace_secs_of(45.0, {"SLURM_JOB_ID": "7"}) == 45


@pytest.mark.parametrize(
    ("environment", "is_joined", "folder"),
    [
        (BATCH, False, "slurm-77"),
        ({**BATCH, "SLURM_STEP_ID": "2"}, False, "slurm-77.2"),
        (TASK, True, "slurm-77"),
        # Nobody requeues it, but its tasks agree on it: an evaluator reads there.
        ({**TASK, "ENVIRONMENT": ""}, True, "slurm-77"),
        # Several runs at once.
        (TASK, False, None),
        # Tasks in steps of their own.
        (BATCH, True, None),
        # A shell on a node, in which one run follows the other.
        ({**BATCH, "ENVIRONMENT": ""}, False, None),
        # A batch script without srun.
        ({"SLURM_JOB_ID": "77", "ENVIRONMENT": "BATCH"}, False, None),
        ({}, False, None),
        ({}, True, None),
    ],
)
def test_the_folder_of_a_job_is_the_same_when_it_is_requeued(
    environment: dict[str, str], is_joined: bool, folder: str | None
) -> None:
    assert folder_of_step(environment, is_joined=is_joined) == folder
    assert folder_of_step({**environment, "SLURM_RESTART_COUNT": "1"}, is_joined=is_joined) == folder


def test_trainers_of_one_program_have_run_dirs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    first, second, other = RunDir(None, "mine"), RunDir(None, "mine"), RunDir(None, "other")
    assert [str(files.path) for files in (first, second, other)] == [
        "runs/mine/slurm-77",
        "runs/mine/slurm-77-2",
        "runs/other/slurm-77",
    ]
    assert str(RunDir("there", "mine").path) == "there"
    assert all(files.is_given for files in (first, second))
    assert Path("runs/mine/slurm-77").is_dir()
