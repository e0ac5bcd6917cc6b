"""The run of all tasks of a cluster over ssh, from the first connection to the exit code."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from kdist import log
from kdist.cluster.network.names import look_up
from kdist.cluster.processes.child import how_it_ended, with_huge_pages
from kdist.cluster.spec import Task
from kdist.errors import ClusterError, ConfigError
from kdist.extras.ssh.connection import (
    Connection,
    ConnectionClosed,
    Event,
    Prepared,
    TaskExited,
    TaskOutput,
    name_by_ssh,
    why_closed,
)
from kdist.extras.ssh.hosts import Host, Request, tasks_by_host, tf_configs
from kdist.fit.signals import SAME_SIGNAL_SECS, exit_code_of

#: Sent to the tasks when this process gets them; for SIGHUP, as when its terminal closes, they get SIGTERM.
_FORWARDED = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)} | {
    signal.SIGHUP: signal.SIGTERM
}
_CLOSE_SECS = 5.0
#: For tasks to notice the end of another one.
_NOTICE_SECS = 5.0
#: For tasks to end after a second signal.
_SECOND_SIGNAL_SECS = 5.0
#: Variables that a machine has set up for itself, or by which another launcher tells a task its role.
_OWN_VARIABLES = {
    "_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TF_CONFIG",
    "TMPDIR", "USER", "WAYLAND_DISPLAY", "XAUTHORITY",
}  # fmt: skip
_OWN_PREFIXES = ("DBUS_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "SSH_", "XDG_")


def run(request: Request) -> int:
    """Starts the tasks, shows their output, and forwards signals to them; returns the exit code.

    That is the code of the task that failed first, or 75 if a signal or the end of its connection ended it.

    Raises:
        ConfigError: a host cannot be reached, for a reason that does not pass by itself, or cannot start tasks.
        ClusterError: a host cannot be reached.
    """
    tasks = tasks_by_host(request.hosts, request.shape)
    events: SimpleQueue[Event] = SimpleQueue()
    connections: dict[Host, Connection] = {}
    try:
        with _receive_signals(events):
            for host, of_host in tasks.items():
                connection = connections[host] = Connection(host, request, events)
                connection.tell(
                    folder=request.folder, number=len(of_host), port=request.port, patience=request.patience
                )
            ports = _ports(events, set(connections), request)
            if isinstance(ports, int):
                return ports
            _start(request, tasks, ports, connections)
            names = {host: [*map(request.name_of, of_host)] for host, of_host in tasks.items()}
            is_cluster = request.joined_chief is None
            return _Tasks(names, connections, request.grace_secs, is_cluster=is_cluster).watch(events)
    finally:
        for connection in connections.values():
            connection.close()
        deadline = time.monotonic() + _CLOSE_SECS
        for connection in connections.values():
            connection.wait(max(0.0, deadline - time.monotonic()))


def variables_to_send(environment: Mapping[str, str]) -> dict[str, str]:
    """Selects the variables for the hosts: all but variables of this machine, this session and other launchers."""
    own = {name for name in environment if name in _OWN_VARIABLES or name.startswith(_OWN_PREFIXES)}
    return {name: value for name, value in environment.items() if name not in own}


def _ports(events: SimpleQueue[Event], hosts: set[Host], request: Request) -> dict[Host, list[int]] | int:
    """The ports for the tasks of each host, once all hosts are ready; an exit code if a signal came before."""
    ports: dict[Host, list[int]] = {}
    deadline = time.monotonic() + request.connect_timeout
    while missing := hosts - ports.keys():
        try:
            event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            names = ", ".join(sorted(map(str, missing)))
            raise ClusterError(f"{names}: not ready after {request.connect_timeout:g} s (--connect-timeout)") from None
        if isinstance(event, Prepared):
            if event.refused is not None:
                raise ConfigError(f"{event.host}: {event.refused}")
            ports[event.host] = event.ports
        elif isinstance(event, ConnectionClosed):
            raise why_closed(event, request.python)
        elif isinstance(event, signal.Signals):
            return exit_code_of(event)
    return ports


def _start(
    request: Request,
    tasks: Mapping[Host, Sequence[Task]],
    ports: Mapping[Host, Sequence[int]],
    connections: Mapping[Host, Connection],
) -> None:
    resolved = look_up(frozenset(host.name for host in tasks))
    # A name that only ssh's config explains means nothing to the other hosts.
    names = {host: None if host.name in resolved else name_by_ssh(host, request.ssh) for host in tasks}
    addresses = {
        task: host.address(port, names[host]) for host in tasks for task, port in zip(tasks[host], ports[host])
    }
    configs = tf_configs(addresses)
    joins = request.joined_chief
    listed = " | ".join(f"{host}: {' '.join(map(request.name_of, tasks[host]))}" for host in tasks)
    log.say(f"kdist.launch | {request.shape} | {f'join {joins} | ' if joins else ''}{listed}")
    environment = with_huge_pages(variables_to_send(os.environ))
    command = (request.python, *request.command)

    def role(task: Task) -> tuple[tuple[str, ...], dict[str, str]]:
        """The command of a task, and the variables that it needs besides."""
        if joins is None:
            return command, {"TF_CONFIG": configs[task]}
        return (*command, "cluster=hosts", f"cluster.job={task.job}", f"cluster.chief={joins}"), {}

    for host, connection in connections.items():
        of_host = [(request.name_of(task), *role(task)) for task in tasks[host]]
        connection.tell(tasks=of_host, environment=environment)


class _Tasks:
    """The tasks, from their start to the end of the last one.

    Args:
        is_cluster: whether one that fails ends the others; those that have joined another cluster continue.
    """

    def __init__(
        self,
        tasks: Mapping[Host, Sequence[str]],
        connections: Mapping[Host, Connection],
        grace_secs: float,
        *,
        is_cluster: bool = True,
    ) -> None:
        self._is_cluster = is_cluster
        self._hosts = {task: host for host, of_host in tasks.items() for task in of_host}
        self._running = set(self._hosts)
        self._connections = connections
        self._grace_secs = grace_secs
        self._width = max(map(len, self._hosts))
        self._code = 0
        # When the tasks are told to end, and when they are killed.
        self._stop_at = self._kill_at = math.inf
        self._told: int | None = None
        self._told_at = 0.0

    def watch(self, events: SimpleQueue[Event]) -> int:
        """Handles events until no task runs; returns the exit code."""
        while self._running:
            due = min(self._stop_at, self._kill_at)
            try:
                event = events.get(timeout=None if due == math.inf else max(0.0, due - time.monotonic()))
            except Empty:
                if self._stop_at == due:
                    self._stop_at = math.inf
                    self._send(signal.SIGTERM)
                    continue
                names = ", ".join(sorted(self._running))
                _report(f"{names} did not end in time; killed")
                break
            if isinstance(event, TaskOutput):
                self._show(event)
            elif isinstance(event, TaskExited):
                self._ended(event)
            elif isinstance(event, ConnectionClosed):
                self._closed(event)
            elif isinstance(event, signal.Signals):
                self._tell(event)
        return self._code

    def _show(self, printed: TaskOutput) -> None:
        stream = sys.stdout if printed.stream == 1 else sys.stderr
        # A terminal that was closed, or `head` that has enough, does not end training.
        with suppress(OSError):
            print(f"{printed.task:<{self._width}} | {printed.text}", file=stream, flush=True)

    def _ended(self, ended: TaskExited) -> None:
        self._running.discard(ended.task)
        if ended.code:
            what = f"{ended.task} on {self._hosts[ended.task]} failed ({how_it_ended(ended.code)})"
            self._fail(what, ended.code if ended.code > 0 else ClusterError.exit_code)

    def _closed(self, closed: ConnectionClosed) -> None:
        lost = sorted(task for task in self._running if self._hosts[task] == closed.host)
        self._running.difference_update(lost)
        if lost:
            said = closed.said.splitlines()[-1] if closed.said else "it was closed, or did not answer"
            self._fail(f"{', '.join(lost)}: the connection with {closed.host} was lost: {said}", ClusterError.exit_code)

    def _fail(self, what: str, code: int) -> None:
        """The first failure ends all tasks, and says with which code."""
        is_cause = self._code == ClusterError.exit_code and code in (1, 2) and self._told is None
        if not self._code or is_cause:
            # 75 may only say that another task has ended, whose reason comes a moment later.
            self._code = code
        if self._kill_at < math.inf:
            return
        now = time.monotonic()
        self._kill_at = now + self._grace_secs
        if self._told is not None:
            # They have been told to end, and the first one has.
            return
        if not self._is_cluster:
            self._kill_at = math.inf
            _report(what)
            return
        _report(f"{what}; ending the other tasks" if self._running else what)
        # Tasks that notice end by themselves, and say what it means for the run. A config is wrong for all of them.
        self._stop_at = now if code == ConfigError.exit_code else now + _NOTICE_SECS

    def _tell(self, received: signal.Signals) -> None:
        """Forwards a signal; after a second one, tasks have little time."""
        now, sent = time.monotonic(), _FORWARDED[received]
        self._send(sent)
        # To tasks, too, SIGUSR1 ahead of a time limit and SIGTERM at the limit are one request to stop.
        was_ahead = self._told in (signal.SIGUSR1, signal.SIGUSR2) and sent == signal.SIGTERM
        if self._told is None or was_ahead:
            self._told, self._told_at = sent, now
        elif now - self._told_at > SAME_SIGNAL_SECS:
            self._code = self._code or exit_code_of(self._told)
            self._kill_at = now + _SECOND_SIGNAL_SECS

    def _send(self, number: int) -> None:
        for connection in self._connections.values():
            connection.tell(signal=number)


def _report(text: str) -> None:
    with suppress(OSError):
        log.say(log.Line(f"kdist: {text}", "error"), stream=sys.stderr)


@contextmanager
def _receive_signals(events: SimpleQueue[Event]) -> Iterator[None]:
    """Turns signals to this process into events; signals that it ignores, as under `nohup`, stay ignored."""
    before = {number: signal.getsignal(number) for number in _FORWARDED}

    def receive(number: int, _frame: Any) -> None:
        events.put(signal.Signals(number))

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
