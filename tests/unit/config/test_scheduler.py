"""What a process knows of the scheduler that started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdist.config.scheduler import folder_of_step, grace_secs_of
from kdist.run.run_dir import RunDir

BATCH = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "ENVIRONMENT": "BATCH"}


def test_schedulers_leave_less_time_to_save() -> None:
    assert grace_secs_of(None, {}) == 30
    assert grace_secs_of(None, {"SLURM_JOB_ID": "7"}) == 20
    assert grace_secs_of(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == 20
    assert grace_secs_of(45.0, {"SLURM_JOB_ID": "7"}) == 45


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        (BATCH, "slurm-77"),
        ({**BATCH, "SLURM_STEP_ID": "2"}, "slurm-77.2"),
        # Several tasks agree on it also where nobody requeues them: an evaluator reads there.
        ({**BATCH, "ENVIRONMENT": "", "SLURM_STEP_NUM_TASKS": "5"}, "slurm-77"),
        # A shell on a node, in which one run follows the other.
        ({**BATCH, "ENVIRONMENT": ""}, None),
        # A batch script without srun.
        ({"SLURM_JOB_ID": "77", "ENVIRONMENT": "BATCH"}, None),
        ({}, None),
    ],
)
def test_the_folder_of_a_job_is_the_same_when_it_is_requeued(environment: dict[str, str], folder: str | None) -> None:
    assert folder_of_step(environment) == folder
    assert folder_of_step({**environment, "SLURM_RESTART_COUNT": "1"}) == folder


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
