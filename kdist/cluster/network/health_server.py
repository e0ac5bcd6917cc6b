"""`HealthServer`: how a task is, over HTTP, for the probes of Kubernetes."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError
from dataclasses import dataclass
from typing import Any

from kdist.cluster.network.http_server import ANY_HOST, HttpServer, Page
from kdist.cluster.spec import Membership
from kdist.threads import in_thread

ALIVE, READY = "/healthz", "/readyz"
_CHIEF_SECS = 1.0


@dataclass(frozen=True)
class Health:
    """How a task is.

    Attributes:
        task: which one.
        is_ready: whether it takes part in training.
        step: the newest global step that it knows; None before training.
        seconds_since_progress: since there was a new step; None before training.
    """

    task: str
    is_ready: bool
    step: int | None = None
    seconds_since_progress: float | None = None


class HealthServer:
    """Serves the health of a task, as `run.health_port` says.

    `/healthz` answers with status 200 as long as the process can answer at all: how long a step may take is what kdist
    itself watches. `/readyz` has status 503 until the task takes part in training. Both say the same, as JSON.

    Args:
        port: where it listens.
        health: called for every request.
        interface: the one that it listens at, see `kdist.cluster.network.bind`; None for all.

    Raises:
        ConfigError: the port cannot be used.
    """

    def __init__(self, port: int, health: Callable[[], Health], interface: str | None = None) -> None:
        self._health = health
        pages = {ALIVE: lambda: self._page(asks_ready=False), READY: lambda: self._page(asks_ready=True)}
        self._server = HttpServer("run.health_port", ANY_HOST, port, pages, interface)

    def close(self) -> None:
        """Closes the port; called once."""
        self._server.close()

    def __enter__(self) -> HealthServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _page(self, *, asks_ready: bool) -> Page:
        health = self._health()
        since = health.seconds_since_progress
        content = {
            "task": health.task,
            "ready": health.is_ready,
            "step": health.step,
            "seconds_since_progress": None if since is None else math.floor(since * 10) / 10,
        }
        return Page(json.dumps(content) + "\n", "application/json", 503 if asks_ready and not health.is_ready else 200)


def health_of_task(membership: Membership, port: int, is_ready: Callable[[], bool]) -> Callable[[], Health]:
    """The health of a task that is not the chief, which it asks for the step at the same port."""
    chief = membership.spec.chief or membership.spec.worker[0]
    host = chief.rpartition(":")[0].strip("[]")

    def health() -> Health:
        asked = in_thread(lambda: _ask(host, port))
        try:
            # The system may look for the name of a chief that is away for longer than a probe waits.
            said = asked.result(_CHIEF_SECS)
        except TimeoutError:
            said = {}
        step, since = said.get("step"), said.get("seconds_since_progress")
        return Health(str(membership.task), is_ready(), step, since)

    return health


def _ask(host: str, port: int) -> Mapping[str, Any]:
    """What the chief says of itself; empty if it does not."""
    connection = http.client.HTTPConnection(host, port, timeout=_CHIEF_SECS)
    try:
        connection.request("GET", ALIVE)
        said = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    return said if isinstance(said, dict) else {}
