"""Sweeps: which jobs of a sweep's folder are done, what they came to, and how they compare.

A sweep is one folder with one numbered folder a job. In it `job.json` says which overrides the job has and how it
ended, beside the `result.json` of its run. That is all that a sweep that is run again needs to know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdist.errors import ConfigError, KdistError
from kdist.folders import make_private, relative, write_whole

if TYPE_CHECKING:
    from omegaconf import DictConfig

_RECORD = "job.json"
#: What a sweep can go by beside the metrics of validation: keys of `result.json`, and which values are better.
_OF_RESULT = {"steps_per_second": "max", "examples_per_second": "max", "seconds": "min"}
#: Overrides that say nothing of what is trained.
_NOT_OF_TRAINING = ("run.", "hydra.", "sweep.")


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    Attributes:
        folder: its run dir; the name is the job's number.
        overrides: its own, of those that the sweep was called with: values by keys.
        status: `running` (or killed), `done`, `failed` or `preempted`.
        error: what it failed with.
        exit_code: what a run of its own would have ended with.
        result: its `result.json`; empty if it has none.
    """

    folder: Path
    overrides: Mapping[str, str]
    status: str = "running"
    error: str | None = None
    exit_code: int = 0
    result: Mapping[str, Any] | None = None

    @property
    def number(self) -> int:
        return int(self.folder.name)

    def write(self) -> None:
        make_private(self.folder)
        record = {name: getattr(self, name) for name in ("overrides", "status", "error", "exit_code")}
        write_whole(self.folder / _RECORD, json.dumps(record, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Job | None:
        """The job of a folder; None if there is none."""
        try:
            record = json.loads((folder / _RECORD).read_text())
        except (OSError, ValueError):
            return None
        try:
            result = json.loads((folder / "result.json").read_text())
        except (OSError, ValueError):
            result = None
        return cls(folder, **record, result=result)


@dataclass(frozen=True)
class Objective:
    """What a sweep goes by.

    Attributes:
        name: as the config has it, without `val_`.
        value: of one job.
        mode: `min` or `max`, which values are better.
    """

    name: str
    value: float
    mode: str


class SweepFailedError(KdistError):
    """Some jobs of a sweep failed; what they said was said."""

    def __init__(self, jobs: Sequence[Job], num_all: int) -> None:
        numbers = ", ".join(str(job.number) for job in jobs)
        super().__init__(f"{len(jobs)} of {num_all} jobs failed: {numbers}")
        self.exit_code = jobs[0].exit_code


def begin_job(folder: Path, overrides: Sequence[str]) -> Job:
    """The job that is to run in a folder, or that is done.

    Args:
        overrides: `key=value`, all that are the job's own.

    Raises:
        ConfigError: the folder holds another job.
    """
    own = dict(_split(override) for override in overrides)
    own = {key: value for key, value in own.items() if not key.startswith(_NOT_OF_TRAINING)}
    job = Job.read(folder)
    if job is not None and job.overrides != own:
        held, wanted = (" ".join(f"{k}={v}" for k, v in o.items()) or "no overrides" for o in (job.overrides, own))
        raise ConfigError(f"{folder}: holds a job with {held}, not {wanted}; give another sweep a folder of its own")
    if job is None or job.status != "done" or (job.result or {}).get("status") != "done":
        job = Job(folder, own)
        job.write()
    return job


def objective(result: Mapping[str, Any], metric: str | None, mode: str | None) -> Objective | None:
    """What a run came to: the best value of a validation metric.

    Args:
        result: the content of `result.json`.
        metric: its name, also with `val_` before it; `steps_per_second`, `examples_per_second` or `seconds`; None is
            the validation loss, or without validation the training loss.
        mode: `min` or `max`; None asks the metric.

    Raises:
        ConfigError: there is no such metric, or it does not say what is better.
    """
    best: Mapping[str, Any] = result.get("best") or {}
    if metric is None and not best:
        loss = result["metrics"]["train"].get("loss")
        return None if loss is None else Objective("train loss", loss, "min")
    name = (metric or "loss").removeprefix("val_")
    if name in _OF_RESULT:
        value, better = result.get(name), _OF_RESULT[name]
    elif name in best:
        value, better = best[name]["value"], best[name]["mode"]
    else:
        raise ConfigError(f"sweep.metric={metric}: a run reports {', '.join([*best, *_OF_RESULT])}")
    if (mode or better) is None:
        raise ConfigError(f"sweep.metric={metric}: say which values are better: sweep.mode=min or sweep.mode=max")
    return None if value is None else Objective(name, value, mode or better)


class SweepJob:
    """What Hydra calls for each job of a sweep, here or in a process that a launcher started.

    Args:
        run: runs a job by its config, in the run dir that Hydra made for it.
        print_error: says what a job failed with.
    """

    def __init__(self, run: Callable[[DictConfig], None], print_error: Callable[[Exception], None]) -> None:
        self._run_job = run
        self._print_error = print_error
        #: What makes the whole sweep worthless, so that it is not found out after every job.
        self._stopped_by: ConfigError | None = None

    def __call__(self, config: DictConfig) -> float | None:
        """Runs the job unless it is done, and returns what the sweep goes by; None if it failed.

        Raises:
            ConfigError: the folder is that of another job, or the sweep's metric is wrong.
        """
        from hydra.core.hydra_config import HydraConfig

        from kdist.config_sources import overrides_of_job

        if self._stopped_by is not None:
            raise self._stopped_by
        hydra = HydraConfig.get()
        overrides = overrides_of_job()
        print(f"\njob {hydra.job.num} | {' '.join(overrides)}", flush=True)
        job = begin_job(relative(Path(hydra.runtime.output_dir)), overrides)
        if job.status == "done":
            print("it is done already", flush=True)
        else:
            self._run(job, config)
            job = Job.read(job.folder) or job
        if job.status != "done" or job.result is None:
            return None
        try:
            found = objective(job.result, config.sweep.metric, config.sweep.mode)
            direction = hydra.sweeper.get("direction")
            if found is not None and direction in ("minimize", "maximize") and direction[:3] != found.mode:
                raise ConfigError(
                    f"hydra.sweeper.direction={direction}: of {found.name}, larger values are "
                    f"{'better' if found.mode == 'max' else 'worse'}; use {found.mode}imize"
                )
        except ConfigError as error:
            self._stopped_by = error
            raise
        return None if found is None else found.value

    def _run(self, job: Job, config: DictConfig) -> None:
        try:
            self._run_job(config)
        except (KeyboardInterrupt, SystemExit):
            replace(job, status="preempted").write()
            raise
        except Exception as error:  # noqa: BLE001 - Hydra would end the sweep
            self._print_error(error)
            code = error.exit_code if isinstance(error, KdistError) else 1
            replace(job, status="failed", error=str(error) or type(error).__name__, exit_code=code).write()
        else:
            replace(job, status="done").write()


class Sweep:
    """The jobs of a sweep's folder.

    Args:
        folder: of the sweep.
        metric, mode: see `objective`.
    """

    def __init__(self, folder: Path, metric: str | None = None, mode: str | None = None) -> None:
        self.folder = folder
        found = [Job.read(path) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
        self.jobs = sorted((job for job in found if job is not None), key=lambda job: job.number)
        self._objectives = {
            job.number: objective(job.result, metric, mode) for job in self.jobs if job.status == "done" and job.result
        }

    @property
    def failed(self) -> list[Job]:
        """The jobs that failed, in their order."""
        return [job for job in self.jobs if job.status == "failed"]

    @property
    def swept(self) -> list[str]:
        """The keys in which jobs differ; all of a sweep of one job."""
        keys = list(dict.fromkeys(key for job in self.jobs for key in job.overrides))
        return [key for key in keys if len(self.jobs) == 1 or len({job.overrides.get(key) for job in self.jobs}) > 1]

    def values_of(self, key: str) -> list[str]:
        """The values that a key has in the jobs: numbers in their order, others as they first came."""
        values = list(dict.fromkeys(job.overrides[key] for job in self.jobs if key in job.overrides))
        return sorted(values, key=float) if values and all(map(is_number, values)) else values

    def objective_of(self, job: Job) -> Objective | None:
        """What a job came to; None if it is not done."""
        return self._objectives.get(job.number)

    @property
    def metric(self) -> str:
        """What the jobs are compared by."""
        return next((found.name for found in self._objectives.values() if found is not None), "objective")

    @property
    def is_done(self) -> bool:
        """Whether every job that was begun is done."""
        return all(job.status == "done" for job in self.jobs)

    def best_first(self) -> list[Job]:
        """The jobs, those that are not done last."""

        def place(job: Job) -> tuple[bool, float]:
            found = self.objective_of(job)
            return (True, 0.0) if found is None else (False, -found.value if found.mode == "max" else found.value)

        return sorted(self.jobs, key=place)

    def table(self) -> list[str]:
        """A line a job, best first; then what failed, and why."""
        heads = ["job", *self.swept, self.metric, "steps/s", "staleness", "status"]
        rows = [self._row(job) for job in self.best_first()]
        widths = [max(map(len, column)) for column in zip(heads, *rows)]
        lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [heads, *rows]]
        lines.insert(1, "-+-".join("-" * width for width in widths))
        for job in self.failed:
            lines.append(f"job {job.number} failed: {(job.error or '').splitlines()[0] if job.error else 'unknown'}")
        return lines

    def _row(self, job: Job) -> list[str]:
        found, result = self.objective_of(job), job.result or {}
        return [
            str(job.number),
            *(job.overrides.get(key, "") for key in self.swept),
            "" if found is None else f"{found.value:.4g}",
            _number(result.get("steps_per_second"), "{:.1f}"),
            _number(staleness_of(job), "{:.2f}"),
            # A job that says it runs was killed: the sweep has ended.
            "not done" if job.status == "running" else job.status,
        ]

    def write(self) -> None:
        """Writes `sweep.txt`, the table, and `sweep.png`."""
        from kdist.sweep_picture import draw_sweep

        write_whole(self.folder / "sweep.txt", "\n".join(self.table()) + "\n")
        draw_sweep(self, self.folder / "sweep.png")


def staleness_of(job: Job) -> float | None:
    """The mean staleness of the gradients of a job."""
    return (job.result or {}).get("gradients", {}).get("staleness_mean")


def workers_of(job: Job) -> int | None:
    """How many workers a job had."""
    return (job.result or {}).get("workers")


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value
