"""What travels between a fit and the processes of its own that run it; see `kdist.launch.subprocesses`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import numpy as np

    from kdist.hooks import Hook
    from kdist.launch.base import FitRequest
    from kdist.launch.stand_ins import UsersHook
    from kdist.run.result import Result

#: Begins a line of the chief that is a warning.
WARNING = "\x1e"
#: Begins one that is kdist's own, as JSON.
LINE = "\x1d"


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker process needs to know before it may import TensorFlow.

    Attributes:
        index: of this worker.
        workers: addresses of all workers; empty if there is only one, which has none to join.
        start_timeout: seconds within which all must have joined.
        num_cpus: logical CPU devices to create; 0 leaves the CPU as it is.
        intra_op_threads, inter_op_threads: see `kdist.cluster.local.thread_budget`.
        folder: holds the request; gets `started-<index>` and `outcome-<index>`.
        path: Python's import path.
        live_line: descriptor of a pipe to a terminal that shows the chief's live line; None without one.
        conversation: descriptor of the chief's pipe to the hooks of the process that started it; None for the others.
        bind: the network interface at which the workers listen, see `kdist.cluster.bind`; None for all.
        cores: the CPU cores it is bound to, see `kdist.cluster.local.cores_of`; None leaves that to the system.
        op_libraries: modules that load ops beside TensorFlow's own, see `kdist._compat.op_libraries`.
    """

    index: int
    workers: list[str]
    start_timeout: float
    num_cpus: int
    intra_op_threads: int
    inter_op_threads: int
    folder: str
    path: list[str]
    live_line: int | None
    conversation: int | None
    bind: str | None
    cores: list[int] | None
    op_libraries: list[str]


@dataclass(frozen=True)
class WorkerRequest:
    """What a worker process is to do.

    Attributes:
        fit: the request, with data that can travel, without hooks and callbacks.
        hooks: those that travel, and descriptions of those that stay with the user; in their order.
        values: of the model and its optimizer, at the start.
    """

    fit: FitRequest
    hooks: Sequence[Hook | UsersHook]
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class WorkerOutcome:
    """What a worker process leaves behind.

    Attributes:
        error: what it raised; None if it ended well.
        result: of the fit; the chief's. So is the rest, if it ended well.
        history: the attributes of a Keras `History`, by name.
        values: of the trained model and its optimizer.
    """

    error: BaseException | None = None
    result: Result | None = None
    history: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)


def values_of(model: keras.Model) -> dict[str, np.ndarray]:
    """All values of a model and its optimizers, by names that are the same for each model built alike."""
    # Not above: workers say how TensorFlow starts before they import it.
    from kdist.model.state import read_from_model

    return read_from_model(model) | {name: counter.numpy() for name, counter in _step_counters(model).items()}


def set_values(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """Undoes `values_of`."""
    from kdist.model.state import write_to_model

    write_to_model(model, values)
    for name, counter in _step_counters(model).items():
        if name in values:
            counter.assign(values[name])


def _step_counters(model: keras.Model) -> dict[str, keras.Variable]:
    from kdist._compat.keras import optimizers_of, step_counter

    return {f"iterations/{name}": step_counter(optimizer) for name, optimizer in optimizers_of(model).items()}
