"""`HealthCheck`: how the chief is, over HTTP, for the probes of Kubernetes."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdist.cluster.health_server import Health, HealthServer
from kdist.config.checks import check_port
from kdist.hooks.base import Hook, RunContext, RunValues, Session


class HealthCheck(Hook):
    """Answers at `http://<host>:<port>/healthz` and `/readyz`, from before the cluster starts to the end.

    Both say the global step and the seconds since there was a new one. `/readyz` has status 503 until training starts.
    `run.health_port` adds it, and a server of the same kind in every other task that was started by others.

    Args:
        port: where it listens; at least 1.
        clock: returns seconds; replaced in tests.
        interface: the network interface at which it listens, see `cluster.bind`; None for all.

    Raises:
        ConfigError: the port is no port; when training starts, it cannot be used.
    """

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic, interface: str | None = None) -> None:
        check_port("run.health_port", port)
        self._port = port
        self._clock = clock
        self._interface = interface
        self._server: HealthServer | None = None

    def begin(self, session: Session) -> None:
        self._step: int | None = None
        self._progress_at = 0.0
        self._server = HealthServer(self._port, self._health, self._interface)

    def after_create_session(self, session: Session) -> None:
        self._has_reached(session.global_step)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._has_reached(values.global_step)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _has_reached(self, step: int) -> None:
        # In this order: a request may come in between.
        self._progress_at = self._clock()
        self._step = step

    def _health(self) -> Health:
        """Called by threads of the server."""
        step = self._step
        since = None if step is None else self._clock() - self._progress_at
        return Health("chief", step is not None, step, since)
