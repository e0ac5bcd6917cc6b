"""Every way in which Slurm ends a job: the step that was reached is saved, and the job resumes."""

from __future__ import annotations

import re

import pytest
from helpers import result_of
from slurm_system import Job, SlurmSystem
from test_slurm_training import MINE, SCRIPT, START_SECS

pytestmark = pytest.mark.long

# Seconds that Slurm leaves a job: KillWait, and what its controller takes to notice.
_STOP_SECS = 60.0
#: It would train for hours.
_LONG = (*MINE, "train.steps_per_epoch=2000", "train.steps=10000000", "hooks.checkpoint.every_secs=3600")


def start(slurm: SlurmSystem, *options: str, arguments: tuple[str, ...] = _LONG) -> Job:
    """A job that trains."""
    job = slurm.submit(*options, SCRIPT, *arguments)
    job.wait_for_step(200, START_SECS)
    return job


def saved_step(job: Job) -> int:
    """The step at which a signal stopped the chief, which is in the newest checkpoint."""
    found = job.wait_for(r"^kdist: stopped by SIG\w+ at step (\d+); last checkpoint: \S+/ckpt-\d+$", _STOP_SECS)
    step = int(found)
    assert f"at step {step}; last checkpoint: " in job.output
    assert re.findall(r"last checkpoint: \S+/ckpt-(\d+)$", job.output, re.MULTILINE)[-1] == found
    return step


def resumes_from(job: Job, step: int) -> None:
    """Waits until the job trains again, from that very step."""
    assert int(job.wait_for(r"^load  \| step +(\d+)", 2 * START_SECS)) == step
    job.wait_for_step(step + 200, START_SECS)


def cancel(slurm: SlurmSystem, job: Job) -> None:
    slurm.run("scancel", str(job.number))
    job.end(_STOP_SECS)


def test_scancel_saves_and_the_same_run_dir_resumes(slurm: SlurmSystem) -> None:
    job = start(slurm)
    slurm.run("scancel", str(job.number))
    step = saved_step(job)
    # Whoever cancels a job does not want it back.
    assert job.end(_STOP_SECS) == "CANCELLED"
    assert result_of(job.run_dir("mine"))["status"] == "preempted"
    again = slurm.submit(SCRIPT, *_LONG, f"run.dir={job.run_dir('mine')}")
    resumes_from(again, step)
    cancel(slurm, again)


def test_another_job_joins_and_is_cancelled_without_a_loss(slurm: SlurmSystem) -> None:
    job = start(slurm)
    joins = ("cluster=hosts", "cluster.job=worker", f"cluster.join={job.run_dir('mine')}")
    command = " ".join(["srun", "python", "-m", "kdist", *_LONG, *joins])
    other = slurm.submit("--ntasks=2", "--nodes=2", "--output=slurm-%j.out", f"--wrap={command}")
    job.wait_for(r"^resize .* -> 2ps5w ", START_SECS)
    slurm.run("scancel", str(other.number))
    assert other.end(_STOP_SECS) == "CANCELLED"
    job.wait_for(r"^resize .* -> 2ps3w ", _STOP_SECS)
    cancel(slurm, job)
    result = result_of(job.run_dir("mine"))
    assert (result["status"], result["restarts"]) == ("preempted", {"worker": 0, "cluster": 0})


def test_a_signal_ahead_of_the_time_limit_saves_and_the_job_requeues_itself(slurm: SlurmSystem) -> None:
    job = start(slurm, "--time=2", "--signal=USR1@60")
    step = saved_step(job)
    resumes_from(job, step)
    assert job.restarts == 1
    cancel(slurm, job)


def test_preemption_saves_and_the_job_resumes(slurm: SlurmSystem) -> None:
    job = start(slurm)
    nodes = f"--nodes={len(slurm.nodes)}"
    urgent = slurm.submit("--partition=high", nodes, "--exclusive", "--wrap=sleep 5", "--output=slurm-%j.out")
    step = saved_step(job)
    assert urgent.end(START_SECS) == "COMPLETED"
    resumes_from(job, step)
    assert job.restarts == 1
    cancel(slurm, job)


def test_requeue_saves_and_the_job_resumes(slurm: SlurmSystem) -> None:
    job = start(slurm)
    slurm.run("scontrol", "requeue", str(job.number))
    step = saved_step(job)
    resumes_from(job, step)
    cancel(slurm, job)


def test_a_lost_server_lets_the_job_requeue_itself(slurm: SlurmSystem) -> None:
    job = start(slurm, arguments=(*_LONG, "hooks.checkpoint.every_secs=2"))
    saved = int(job.wait_for(r"^save  \| step +([1-9]\d*)", _STOP_SECS))
    # The last rank is a server.
    job.kill(rank=4)
    job.wait_for(r"^kdist: error: ps:1 is lost", _STOP_SECS)
    # Nobody has sent a signal; what was trained since the last save is lost.
    step = int(job.wait_for(r"^load  \| step +(\d+)", 2 * START_SECS))
    assert step >= saved
    assert job.restarts == 1
    job.wait_for_step(step + 200, START_SECS)
    cancel(slurm, job)


def test_a_chief_that_was_killed_lets_the_job_requeue_itself(slurm: SlurmSystem) -> None:
    job = start(slurm, arguments=(*_LONG, "hooks.checkpoint.every_secs=2"))
    saved = int(job.wait_for(r"^save  \| step +([1-9]\d*)", _STOP_SECS))
    job.kill(rank=0)
    assert int(job.wait_for(r"^load  \| step +(\d+)", 2 * START_SECS)) >= saved
    assert job.restarts == 1
    cancel(slurm, job)


def test_a_job_that_fails_by_itself_is_not_requeued(slurm: SlurmSystem) -> None:
    job = slurm.submit(SCRIPT, *MINE, "train.steps=10", "+data.label_offset=9")
    assert job.end(2 * START_SECS) == "FAILED", job.output
    assert job.restarts == 0
    assert "kdist: error" in job.output
