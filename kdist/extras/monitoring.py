"""Hooks that answer over HTTP while a run lasts: metrics for Prometheus, health for the probes of Kubernetes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kdist.cluster.network.http_server import HttpServer, health_of, health_server
from kdist.cluster.processes.usage import resident_bytes
from kdist.config.checks import check_port
from kdist.config.schema import RunConfig
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.hooks.reports import RunTotals

PATH = "/metrics"

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_EVERY_SECS = 5.0
#: Every name with its type and meaning, in the order in which they are shown.
_HELP = {
    "kdist_global_step": ("gauge", "Updates applied to the parameters."),
    "kdist_last_step": ("gauge", "The global step at which training ends, if it is known."),
    "kdist_steps_per_second": ("gauge", "Rate of the last seconds, without steps in which functions were traced."),
    "kdist_examples_per_second": ("gauge", "Rate of the last seconds, as kdist_steps_per_second."),
    "kdist_staleness_mean": ("gauge", "Updates between the pull and the push of a gradient, over the last seconds."),
    "kdist_staleness_max": ("gauge", "The largest of these."),
    "kdist_dropped_gradients_total": ("counter", "Gradients that were not part of an update."),
    "kdist_lost_workers_total": ("counter", "How often a worker was lost."),
    "kdist_restarts_total": ("counter", "How often a worker returned, and how often the cluster was restarted."),
    "kdist_resident_memory_bytes": ("gauge", "Memory of the chief, and of the other tasks on its machine."),
    "kdist_training": ("gauge", "Loss and metrics of training, over the last seconds."),
    "kdist_validation": ("gauge", "Loss and metrics of the last validation."),
}


class _Served(Hook):
    """Serves pages until the run ends."""

    _server: HttpServer | None = None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class MetricsServer(_Served):
    """Serves the state of the run at `http://<host>:<port>/metrics`, from before the cluster starts to the end.

    `run.metrics_port` adds it.

    Args:
        port: where it listens; at least 1.
        host: the address; another than the loopback address opens it to the network, for anyone to read.
        clock: returns seconds; replaced in tests.

    Raises:
        ConfigError: the port is no port; when training starts, the address cannot be used.
    """

    def __init__(
        self, port: int, host: str = RunConfig.metrics_host, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_port("run.metrics_port", port)
        self._address = (host, port)
        self._clock = clock

    def begin(self, session: Session) -> None:
        self._dropped = 0
        self._begin_window()
        self._state: dict[str, dict[str, float]] = {}
        self._pids: Mapping[str, int] = {}
        host, port = self._address
        self._server = HttpServer("run.metrics_port", host, port, {PATH: lambda: (self._text(), _CONTENT_TYPE, 200)})

    def after_create_session(self, session: Session) -> None:
        self._set_counts(session)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        session = context.session
        self._dropped += sum(counts.dropped for counts in values.gradient_counts.values())
        self._window.add(values)
        if self._clock() - self._began >= _EVERY_SECS or "kdist_training" not in self._state:
            self._report(session)
        self._set_counts(session)

    def after_validation(self, session: Session, logs: Mapping[str, Any]) -> None:
        self._state["kdist_validation"] = _by_metric(logs)

    def _report(self, session: Session) -> None:
        window = self._window
        self._begin_window()
        self._state["kdist_training"] = _by_metric(session.training_logs(window.totals))
        if session.is_asynchronous:
            self._state["kdist_staleness_mean"] = {"": window.gradients.staleness_mean}
            self._state["kdist_staleness_max"] = {"": window.gradients.staleness_max}
        if window.steps_per_second is not None and window.examples_per_second is not None:
            self._state["kdist_steps_per_second"] = {"": window.steps_per_second}
            self._state["kdist_examples_per_second"] = {"": window.examples_per_second}

    def _begin_window(self) -> None:
        """Forgets the steps that were reported."""
        self._window, self._began = RunTotals(), self._clock()

    def _set_counts(self, session: Session) -> None:
        state = self._state
        state["kdist_global_step"] = {"": session.global_step}
        if session.last_step is not None:
            state["kdist_last_step"] = {"": session.last_step}
        state["kdist_dropped_gradients_total"] = {"": self._dropped}
        state["kdist_lost_workers_total"] = {"": session.strategy.worker_losses}
        state["kdist_restarts_total"] = {_labels(kind=kind): count for kind, count in session.restarts.items()}
        self._pids = {str(task): pid for task, pid in session.strategy.pids.items()}

    def _text(self) -> str:
        """The state in Prometheus's text format; called by threads of the server."""
        pids = {"chief": os.getpid(), **self._pids}
        memory = {_labels(task=task): resident_bytes(pid) for task, pid in pids.items()}
        state: dict[str, dict[str, float]] = dict(self._state)
        state["kdist_resident_memory_bytes"] = {labels: size for labels, size in memory.items() if size is not None}
        lines = []
        for name, (kind, meaning) in _HELP.items():
            if samples := state.get(name):
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
                lines += [f"{name}{labels} {_number(value)}" for labels, value in samples.items()]
        return "\n".join(lines) + "\n"


def _by_metric(logs: Mapping[str, Any]) -> dict[str, float]:
    """Samples of loss and metrics; of a metric with several values, one for each."""
    samples: dict[str, float] = {}
    for name, value in logs.items():
        if np.ndim(value) == 0:
            samples[_labels(metric=name)] = float(value)
        else:
            samples |= {_labels(metric=name, index=str(i)): float(each) for i, each in enumerate(np.ravel(value))}
    return samples


def _labels(**labels: str) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f"{value:+}".replace("+nan", "NaN").replace("inf", "Inf")


class HealthCheck(_Served):
    """Answers at `http://<host>:<port>/healthz` and `/readyz`, from before the cluster starts to the end.

    Both say the global step and the seconds since there was a new one. `/readyz` has status 503 until training starts.
    `run.health_port` adds it, and a server of the same kind in every other task that was started by others.

    Args:
        port: where it listens; at least 1.
        clock: returns seconds; replaced in tests.
        interface: the network interface at which it listens; None for `cluster.bind`.

    Raises:
        ConfigError: the port is no port; when training starts, it cannot be used.
    """

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic, interface: str | None = None) -> None:
        check_port("run.health_port", port)
        self._port = port
        self._clock = clock
        self._interface = interface

    def begin(self, session: Session) -> None:
        #: The last step and its time, in one: a request may come at any moment.
        self._reached: tuple[int, float] | None = None
        self._server = health_server(self._port, self._health, self._interface)

    def after_create_session(self, session: Session) -> None:
        self._reached = session.global_step, self._clock()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._reached = values.global_step, self._clock()

    def _health(self) -> Mapping[str, Any]:
        """Called by threads of the server."""
        if (reached := self._reached) is None:
            return health_of("chief", is_ready=False)
        step, at = reached
        return health_of("chief", is_ready=True, step=step, seconds_since_progress=self._clock() - at)
