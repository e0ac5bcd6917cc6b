"""Pages of text over HTTP: for Prometheus, and the health of a task for the probes of Kubernetes."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from kdist.cluster.network import sockets
from kdist.cluster.network.names import host_and_port
from kdist.cluster.spec import Membership
from kdist.errors import ConfigError
from kdist.threads import in_thread

#: Every address of this machine, of IPv4 and IPv6.
ANY_HOST = "::"
_ALIVE, _READY = "/healthz", "/readyz"
_TIMEOUT_SECS = 10.0
_CHIEF_SECS = 1.0

#: The response to a request: text, its content type, the status of HTTP.
Page = tuple[str, str, int]


class HttpServer(ThreadingHTTPServer):
    """Serves pages in background threads until it is closed; raises `ConfigError` if the address cannot be used.

    Args:
        key: the config key of the port, for messages.
        host: the address; `ANY_HOST` opens it to the network.
        pages: functions that make the page of each path; called by threads of the server.
        interface: see `kdist.cluster.network.sockets`; None listens at all of them.
    """

    daemon_threads = True

    def __init__(
        self, key: str, host: str, port: int, pages: Mapping[str, Callable[[], Page]], interface: str | None = None
    ) -> None:
        self.pages = pages
        self._interface = interface
        own_host = "" if host == ANY_HOST and not socket.has_dualstack_ipv6() else host
        self.address_family = socket.AF_INET6 if ":" in own_host else socket.AF_INET
        try:
            super().__init__((own_host, port), _Handler)
        except OSError as error:
            where = f"port {port}" if host == ANY_HOST else f"{host}:{port}"
            raise ConfigError(
                f"{key}={port}: {where} cannot be used: {error.strerror or error}; choose another port"
            ) from error
        threading.Thread(target=self.serve_forever, name=f"kdist-{key}", daemon=True).start()

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sockets.bind(self.socket, self._interface)
        # Not HTTPServer's: it asks for the name of this machine, and waits for a name server that does not respond.
        TCPServer.server_bind(self)

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_SECS
    server: HttpServer

    def do_GET(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            self.send_error(404, f"there is {' and '.join(self.server.pages)}")
            return
        text, content_type, status = make()
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: a run's console is not for requests."""


def health_of(
    task: str, *, is_ready: bool, step: int | None = None, seconds_since_progress: float | None = None
) -> dict[str, Any]:
    """The content of the page of a task: the newest step that it knows, if any, and the seconds since it is known."""
    since = None if seconds_since_progress is None else math.floor(seconds_since_progress * 10) / 10
    return {"task": task, "ready": is_ready, "step": step, "seconds_since_progress": since}


def health_server(port: int, health: Callable[[], Mapping[str, Any]], interface: str | None = None) -> HttpServer:
    """Serves the `health_of` a task, as `run.health_port` says; raises `ConfigError` if the port cannot be used.

    `/healthz` answers with status 200 as long as the process can answer at all: kdist itself watches the time of a
    step. `/readyz` has status 503 until the task takes part in training. Both say the same, as JSON.
    """

    def page(*, asks_ready: bool) -> Page:
        found = health()
        status = 503 if asks_ready and not found["ready"] else 200
        return json.dumps(found) + "\n", "application/json", status

    pages = {_ALIVE: lambda: page(asks_ready=False), _READY: lambda: page(asks_ready=True)}
    return HttpServer("run.health_port", ANY_HOST, port, pages, interface or sockets.named())


def health_of_task(membership: Membership, port: int, is_ready: Callable[[], bool]) -> Callable[[], Mapping[str, Any]]:
    """Returns the health of a task that is not the chief, which it asks for the step at the same port."""
    host, _ = host_and_port(membership.spec.chief or membership.spec.worker[0])

    def health() -> Mapping[str, Any]:
        said: Mapping[str, Any] = {}
        with suppress(TimeoutError):
            # The system may look for the name of a chief that is away for longer than a probe waits.
            said = in_thread(lambda: _ask(host, port)).result(_CHIEF_SECS)
        since = said.get("seconds_since_progress")
        return health_of(str(membership.task), is_ready=is_ready(), step=said.get("step"), seconds_since_progress=since)

    return health


def _ask(host: str, port: int) -> Mapping[str, Any]:
    """The health of the chief; empty if it does not answer."""
    with (
        suppress(OSError, http.client.HTTPException, ValueError),
        closing(http.client.HTTPConnection(host, port, timeout=_CHIEF_SECS)) as connection,
    ):
        connection.request("GET", _ALIVE)
        said = json.loads(connection.getresponse().read())
        return said if isinstance(said, dict) else {}
    return {}
