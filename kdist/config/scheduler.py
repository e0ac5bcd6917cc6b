"""Differences in a process that a scheduler, Slurm or Kubernetes, has started."""

from __future__ import annotations

from collections.abc import Mapping

#: Seconds to save and exit after a stop signal where nobody ends the process by force.
GRACE_SECS = 30.0
#: Slurm's KillWait and the `terminationGracePeriodSeconds` of pods are 30 by default.
_GRACE_SECS_OF_JOBS = 20.0


def grace_secs_of(given: float | None, environment: Mapping[str, str]) -> float:
    """`run.grace_secs` if it is given; otherwise the usual time of a process in this environment."""
    if given is not None:
        return given
    is_job = "SLURM_JOB_ID" in environment or "KUBERNETES_SERVICE_HOST" in environment
    return _GRACE_SECS_OF_JOBS if is_job else GRACE_SECS


def secs_for_calls(grace_secs: float) -> float:
    """Of the seconds to save and exit, those that calls in flight have to finish; the others are for the save."""
    return grace_secs / 2


def folder_of_step(environment: Mapping[str, str], *, is_joined: bool) -> str | None:
    """`slurm-77`, the name of the run dir of a Slurm job, so that the job resumes when it is requeued.

    Each step of a job has its own: the first one this, the next one `slurm-77.1`. None if the step is not one run, as
    in an interactive job, where one command follows the other, and for what a batch script runs without `srun`.

    Args:
        is_joined: true if this process is one of the tasks of a run, false if it is the whole run.
    """
    job, step, count = (environment.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "STEP_NUM_TASKS"))
    if not (job.isdecimal() and step.isdecimal() and count.isdecimal()) or is_joined != (int(count) > 1):
        return None
    if environment.get("ENVIRONMENT") != "BATCH" and not is_joined:
        return None
    return f"slurm-{job}" if int(step) == 0 else f"slurm-{job}.{step}"
