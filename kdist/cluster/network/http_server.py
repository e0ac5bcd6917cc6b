"""`HttpServer`: a few pages of text over HTTP, as those that Prometheus and the probes of Kubernetes read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from kdist.cluster.network import bind
from kdist.errors import ConfigError

_TIMEOUT_SECS = 10.0
#: Every address of this machine, of IPv4 and IPv6.
ANY_HOST = "::"


@dataclass(frozen=True)
class Page:
    """What a request gets.

    Attributes:
        text: the content.
        content_type: of the text.
        status: of HTTP.
    """

    text: str
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


class HttpServer:
    """Serves pages until it is closed, from threads of its own.

    Args:
        key: the config key of the port, for messages.
        host: the address; `ANY_HOST` opens it to the network.
        pages: functions that make the page of each path; called by threads of the server.
        interface: see `kdist.cluster.network.bind`; None listens at all of them.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self, key: str, host: str, port: int, pages: Mapping[str, Callable[[], Page]], interface: str | None = None
    ) -> None:
        try:
            self._server = _Server(host, port, pages, interface)
        except OSError as error:
            where = f"port {port}" if host == ANY_HOST else f"{host}:{port}"
            raise ConfigError(
                f"{key}={port}: {where} cannot be used: {error.strerror or error}; choose another port"
            ) from error
        threading.Thread(target=self._server.serve_forever, name=f"kdist-{key}", daemon=True).start()

    def close(self) -> None:
        """Closes the port; called once."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], Page]], interface: str | None) -> None:
        self.pages = pages
        self._interface = interface
        if host == ANY_HOST and not socket.has_dualstack_ipv6():
            host = ""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bind.bind(self.socket, self._interface)
        # Not HTTPServer's: it asks for the name of this machine, and waits for a name server that does not respond.
        TCPServer.server_bind(self)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_SECS
    server: _Server

    def do_GET(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            self.send_error(404, f"there is {' and '.join(self.server.pages)}")
            return
        page = make()
        content = page.text.encode()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """A run's console is not for requests."""
