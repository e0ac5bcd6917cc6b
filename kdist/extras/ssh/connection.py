"""The launcher's side of one host: an ssh process, and the messages of the agent that it runs there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from signal import Signals
from typing import IO, Any

from kdist.cluster.processes.child import KILLED_SECS
from kdist.errors import ClusterError, ConfigError, KdistError
from kdist.extras.ssh.agent import MARK
from kdist.extras.ssh.hosts import Host, Request

# Reads the agent's source from standard input and runs it; its process shows no more than this.
_BOOTSTRAP = "import sys;i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),'kdist-agent','exec'))"
_AGENT = Path(__file__).with_name("agent.py")
_END_SECS = 5.0
_NAME_SECS = 5.0


@dataclass(frozen=True)
class Prepared:
    """A host can start its tasks, which may use `ports`; or it cannot, for the reason `refused`."""

    host: Host
    ports: list[int]
    refused: str | None


@dataclass(frozen=True)
class TaskOutput:
    """A task has printed a line; stream 1 is standard output, 2 standard error."""

    task: str
    stream: int
    text: str


@dataclass(frozen=True)
class TaskExited:
    """A task has ended; a negative code is the number of a signal."""

    task: str
    code: int


@dataclass(frozen=True)
class ConnectionClosed:
    """A connection has ended, and with it every task of the host.

    Attributes:
        code: the exit code of ssh: the remote command's, or 255.
        said: the messages of ssh, or of the shell of the host.
    """

    host: Host
    code: int
    said: str


#: A signal is one that this process has received.
Event = Prepared | TaskOutput | TaskExited | ConnectionClosed | Signals


class Connection:
    """A host, reached by ssh, on which the agent runs; every event of it is put into `events`."""

    def __init__(self, host: Host, request: Request, events: SimpleQueue[Event]) -> None:
        self.host = host
        self._request = request
        self._events = events
        self._lock = threading.Lock()
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": round(request.connect_timeout),
            "ServerAliveInterval": max(1, round(request.patience / 3)),
            "ServerAliveCountMax": 3,
            # Without banners; errors are shown.
            "LogLevel": "ERROR",
            # One that other sessions share would end with them.
            "ControlPath": "none",
            "ForwardAgent": "no",
            "ClearAllForwardings": "yes",
        }
        given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        command = f"exec {shlex.quote(request.python)} -I -c {shlex.quote(_BOOTSTRAP)}"
        try:
            self._process = subprocess.Popen(
                [*request.ssh, "-T", "-x", *given, host.login, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C in a terminal would end ssh before the tasks have saved.
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"--ssh {request.ssh[0]}: {error.strerror}") from None
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        source = _AGENT.read_bytes()
        self._write(b"%d\n%s" % (len(source), source))
        threading.Thread(target=self._follow, name=f"kdist-ssh-{host}", daemon=True).start()
        threading.Thread(target=self._give_signs_of_life, name=f"kdist-ssh-life-{host}", daemon=True).start()

    def tell(self, **message: Any) -> None:
        """Sends the agent a message. It answers the first one by `Prepared`; one without content is a sign of life."""
        self._write((json.dumps(message) + "\n").encode())

    def close(self) -> None:
        """Closes the connection, and so ends every task of the host; returns at once."""
        with self._lock, suppress(OSError):
            self._stdin.close()

    def wait(self, timeout: float) -> None:
        """Waits for the end of a connection that was closed, and ends it if that takes longer."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILLED_SECS)

    def _write(self, content: bytes) -> None:
        # If ssh has ended, `ConnectionClosed` says so.
        with self._lock, suppress(OSError, ValueError):
            self._stdin.write(content)
            self._stdin.flush()

    def _give_signs_of_life(self) -> None:
        while self._process.poll() is None:
            time.sleep(self._request.patience / 3)
            self.tell()

    def _follow(self) -> None:
        """Turns messages of the host into events, until the connection has ended."""
        said: list[str] = []
        reader = threading.Thread(target=_collect, args=(self._process.stderr, said), daemon=True)
        reader.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _, mark, message = line.decode(errors="replace").partition(MARK)
            if mark:
                self._events.put(_event_of(self.host, json.loads(message)))
        code = self._process.wait()
        reader.join(_END_SECS)
        self._events.put(ConnectionClosed(self.host, code, "\n".join(said[-20:])))


def _collect(stream: IO[bytes], lines: list[str]) -> None:
    lines.extend(line.decode(errors="replace").strip() for line in stream)


def _event_of(host: Host, message: Mapping[str, Any]) -> Event:
    if "task" not in message:
        return Prepared(host, message.get("ready", []), message.get("refused"))
    return TaskExited(**message) if "code" in message else TaskOutput(**message)


#: Messages of ssh, their causes, and ways out.
_REASONS = (
    (r"Could not resolve hostname", "its name cannot be resolved", ConfigError),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that ssh knows; if that is right, `ssh-keygen -R {host}` forgets the old one",
        ConfigError,
    ),
    (
        r"Host key verification failed",
        "ssh does not know its host key; connect once by hand, `ssh {login}`, and compare it",
        ConfigError,
    ),
    (
        r"Permission denied|Too many authentication failures",
        "ssh cannot log in without a password; `ssh-copy-id {login}` installs a key, `ssh-add` unlocks one",
        ConfigError,
    ),
    (r"Bad configuration option|command-line: line|unknown option|usage: ssh", "ssh refuses its options", ConfigError),
    (r"Connection refused", "no sshd answers there", ClusterError),
    (r"timed out|No route to host|Network is unreachable", "it does not answer", ClusterError),
)


def why_closed(closed: ConnectionClosed, python: str) -> KdistError:
    """The error for a connection that ended before its host was ready."""
    host, last = closed.host, closed.said.splitlines()[-1] if closed.said else f"ssh ended with code {closed.code}"
    for pattern, meaning, error in _REASONS:
        if re.search(pattern, closed.said, re.IGNORECASE):
            return error(f"{host}: {meaning.format(host=host.name, login=host.login)}\n  {last}")
    if closed.code in (126, 127):
        return ConfigError(f"{host}: cannot run {python} (--python names another interpreter)\n  {last}")
    return ClusterError(f"{host}: the connection failed\n  {last}")


def name_by_ssh(host: Host, ssh: Sequence[str]) -> str | None:
    """The name or address that ssh's own config has for a host; None if it says nothing."""
    try:
        done = subprocess.run([*ssh, "-G", host.login], capture_output=True, text=True, timeout=_NAME_SECS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
    return found[1] if found and not done.returncode else None
