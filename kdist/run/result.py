"""`result.json`: the exact record of a run, and where it came from; written atomically at its end, however it ends."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kdist.config.environment import as_written
from kdist.errors import ConfigError
from kdist.log import for_json, plain_text
from kdist.model.logs import Logs, scalars
from kdist.strategies.gradient_counts import GradientCounts

#: Grows when readers of an earlier version would misread the file. A file without it is of format 1.
FORMAT = 1
#: Seconds that Git may take, on a slow file system.
_GIT_SECS = 3.0


@dataclass(frozen=True)
class Origin:
    """The beginning of a run, as `result.json` records it.

    Attributes:
        config: the config; None if there is none but the arguments of a `Trainer`.
        overrides: `key=value`, of the command line.
        git: `commit` and `dirty` (None if unknown) of the working directory; None outside of a repository.
        host: the name of the machine.
        started: the time of the start; ISO 8601, UTC.
    """

    config: Mapping[str, Any] | None
    overrides: Sequence[str]
    git: Mapping[str, Any] | None
    host: str
    started: str

    @classmethod
    def here_and_now(cls, config: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Origin:
        return cls(config, list(overrides), git_state(), socket.gethostname(), now())


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def git_state() -> dict[str, Any] | None:
    """The commit of the working directory, and whether files that belong to it have changed since."""
    if not (commit := _git("rev-parse", "HEAD")):
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    """The output of Git; None without Git, without a commit, or if it takes too long."""
    # A repository may name a program as its monitor; and nothing is written to it.
    command, environment = ["git", "-c", "core.fsmonitor=false", *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, timeout=_GIT_SECS
        )
        return output.decode(errors="replace").strip()
    return None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("kdist", "tensorflow", "keras", "numpy", "hydra-core"):
        # TensorFlow is installed under several names.
        imported = getattr(sys.modules.get(package), "__version__", "unknown")
        found[package] = _installed_version(package) or imported
    return found


@cache
def _installed_version(package: str) -> str | None:
    """The version of a package, which takes milliseconds to read; None if none is installed under that name."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def describe(error: BaseException) -> str:
    """The message of the error that ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (SIGINT)"
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
        return "terminated (SIGTERM)"
    return as_written(plain_text(str(error))) or type(error).__name__


@dataclass
class Gradients:
    """The fate of the gradients of this run.

    Attributes:
        applied: the number of applied gradients; each is one global step.
        dropped: the number of computed gradients that were not applied.
        staleness_mean, staleness_max: over the applied ones: how many others were applied between the pull of the
            parameters and the push of the gradient.
        by_worker: the fate of each worker's gradients, by its name (`worker:0`); empty without servers.
    """

    applied: int = 0
    dropped: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    by_worker: dict[str, GradientCounts] = field(default_factory=dict)


@dataclass
class Result:
    """The content of `result.json`.

    Attributes:
        status: `done`, `failed` or `preempted` (ended by a signal after a checkpoint).
        global_step: updates applied to the parameters since step 0, earlier runs included.
        stopped_by: the hook or signal that ended the run; `StopAtStep` at `steps`, or after `epochs` of a known length.
        strategy, cluster: as resolved, for example `parameter_server` and `2ps2w`.
        workers: the number of workers that computed gradients.
        steps_per_second, examples_per_second: steady rates, warm-up (tracing) left out; None if nothing else ran.
        seconds: the duration of the whole run.
        examples: the number of training examples that this run used.
        metrics: `train`: loss and metrics of the last epoch; `validation`: of the final parameters.
        best: the best value of each validation metric, by name: `value`, `step` and `mode` (`min` or `max`).
        gradients: see `Gradients`.
        restarts: restarted `worker`s, and restarts of the whole `cluster`.
        extra_steps: steps beyond the requested ones, repeated after the loss of a worker.
        overflowed_steps: steps of the model that updated nothing, because their gradients overflowed; None if the loss
            is not scaled.
        resizes: the changes of the cluster, see `kdist.run.resizes.Resize`: `from`, `to`, `step`, `why` and others.
        error: the message of the error that ended a failed run.
        config: the resolved config, except for references to the environment: `${oc.env:PASSWORD}` may be a secret.
            Without the command line, the plain arguments of the `Trainer` under the same keys.
        seed: the start of shuffling and random states; None if the run failed before it had one.
        overrides, git, host, started: see `Origin`.
        ended: the time of the end; ISO 8601, UTC.
        versions: the versions of kdist, TensorFlow, Keras and others, and of Python.
    """

    status: str = "failed"
    global_step: int = 0
    stopped_by: str | None = None
    strategy: str = ""
    cluster: str = ""
    workers: int = 1
    steps_per_second: float | None = None
    examples_per_second: float | None = None
    seconds: float = 0.0
    examples: int = 0
    metrics: dict[str, Logs] = field(default_factory=lambda: {"train": {}, "validation": {}})
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=Gradients)
    restarts: dict[str, int] = field(default_factory=lambda: {"worker": 0, "cluster": 0})
    extra_steps: int = 0
    overflowed_steps: int | None = None
    resizes: Sequence[Mapping[str, Any]] = ()
    error: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    seed: int | None = None
    git: Mapping[str, Any] | None = None
    host: str = ""
    started: str | None = None
    ended: str = field(default_factory=now)
    versions: dict[str, str] = field(default_factory=versions)

    @classmethod
    def of(cls, file: dict[str, Any]) -> Result:
        """Makes a result from a `result.json`; missing fields have their defaults."""
        known = {field.name: file[field.name] for field in fields(cls) if field.name in file}
        if isinstance(gradients := known.get("gradients"), dict):
            by_worker = {name: GradientCounts(**counts) for name, counts in gradients.get("by_worker", {}).items()}
            known["gradients"] = Gradients(**{**gradients, "by_worker": by_worker})
        return cls(**known)

    def to_json(self) -> str:
        """The content of the file. NaN and infinity become null, because JSON has neither."""
        return json.dumps(for_json({"format": FORMAT, **asdict(self)}), indent=2, allow_nan=False) + "\n"


def content_of(file: bytes) -> dict[str, Any]:
    """The content of a record in JSON; empty if it cannot be read."""
    with suppress(ValueError, RecursionError):
        found = json.loads(file)
        return found if isinstance(found, dict) else {}
    return {}


def record_in(file: bytes | None, place: object) -> dict[str, Any]:
    """The content of the `result.json` at a `place`; empty if it is missing or unreadable.

    Raises `ConfigError` if a newer version wrote it, so that this one would misread it.
    """
    found = content_of(file or b"")
    if (number := found.get("format", 1)) != FORMAT:
        by = (found.get("versions") or {}).get("kdist", "a newer version")
        raise ConfigError(f"{place}: was written by kdist {by}, in format {number}; this version reads format {FORMAT}")
    return found


def final_metrics(result: Result) -> dict[str, float]:
    """The final metrics of a run, by the tags of TensorBoard's HParams tab."""
    found = {
        f"final/{split}_{name}": value
        for split, logs in sorted(result.metrics.items(), reverse=True)
        for name, value in scalars(logs)
    }
    found["final/examples_per_sec"] = result.examples_per_second or math.nan
    return {tag: value for tag, value in found.items() if math.isfinite(value)}
