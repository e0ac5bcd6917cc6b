"""`result.json`: the exact account of a run, written atomically at its end, however it ends."""

from __future__ import annotations

import json
import math
import platform
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("kdist", "tensorflow", "keras", "hydra-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = getattr(sys.modules.get(package), "__version__", "unknown")
    return found


def describe(error: BaseException) -> str:
    """One message for what ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (SIGINT)"
    if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
        return "terminated (SIGTERM)"
    return str(error) or type(error).__name__


@dataclass(frozen=True)
class Contributions:
    """What became of the gradients that one worker computed for synchronous updates.

    Attributes:
        accepted: part of an update.
        dropped: computed in vain; none of it was applied.
        stale: of the dropped ones, those whose parameters had been updated meanwhile.
    """

    accepted: int = 0
    dropped: int = 0
    stale: int = 0

    def __add__(self, other: Contributions) -> Contributions:
        return Contributions(self.accepted + other.accepted, self.dropped + other.dropped, self.stale + other.stale)


def add_contributions(
    some: Mapping[int, Contributions], others: Mapping[int, Contributions]
) -> dict[int, Contributions]:
    """The sums by worker index."""
    none = Contributions()
    return {worker: some.get(worker, none) + others.get(worker, none) for worker in sorted({*some, *others})}


@dataclass
class Gradients:
    """What became of the gradients of this run.

    Attributes:
        applied: how many were applied; each is one global step.
        dropped: how many were computed in vain.
        staleness_mean, staleness_max: over the applied ones, how many others were applied between the pull of the
            parameters and the push of the gradient.
        by_worker: what became of each worker's gradients, by its name (`worker:0`); empty without servers.
    """

    applied: int = 0
    dropped: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    by_worker: dict[str, Contributions] = field(default_factory=dict)


@dataclass
class Result:
    """The content of `result.json`.

    Attributes:
        status: `done`, `failed` or `preempted` (ended by a signal after a checkpoint).
        global_step: updates applied to the parameters since step 0, earlier runs included.
        stopped_by: the hook or signal that ended the run.
        strategy, cluster: as resolved, for example `parameter_server` and `2ps2w`.
        workers: how many computed gradients.
        steps_per_second, examples_per_second: steady rates, warm-up (tracing) left out; None if nothing else ran.
        seconds: of the whole run.
        examples: how many training examples this run saw.
        metrics: `train`: loss and metrics of the last epoch; `validation`: those of the final parameters.
        best: the best value of each validation metric, by name: `value`, `step` and `mode` (`min` or `max`).
        gradients: see `Gradients`.
        restarts: restarted `worker`s, and restarts of the whole `cluster`.
        extra_steps: steps beyond those asked for, repeated after the loss of a worker.
        error: the message of what ended a failed run.
        versions: of kdist, TensorFlow, Keras and Python.
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
    metrics: dict[str, dict[str, float]] = field(default_factory=lambda: {"train": {}, "validation": {}})
    best: dict[str, dict[str, Any]] = field(default_factory=dict)
    gradients: Gradients = field(default_factory=Gradients)
    restarts: dict[str, int] = field(default_factory=lambda: {"worker": 0, "cluster": 0})
    extra_steps: int = 0
    error: str | None = None
    versions: dict[str, str] = field(default_factory=versions)

    def to_json(self) -> str:
        """The content of the file. NaN and infinity become null, as JSON wants it."""
        return json.dumps(_as_json(asdict(self)), indent=2, allow_nan=False) + "\n"


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
