"""Probes of the addresses of tasks: a single one, or one after another in threads that nothing waits for.

A refused connection shows at once that no task listens. Silence does not: a packet may be lost, or a network be down
for some seconds. A silent task counts as lost only after `cluster.patience` seconds.
"""

from __future__ import annotations

import enum
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kdist.cluster.network.names import address_info, host_and_port
from kdist.cluster.spec import Task
from kdist.errors import ClusterError
from kdist.threads import in_thread

_PAUSE_SECS = 0.5
# A lost SYN packet is sent again after one second.
_PROBE_SECS = 2.0
_MEET_POLL_SECS = 0.1

#: Inodes of the sockets of present probes.
in_use: set[int] = set()


class State(enum.Enum):
    UNKNOWN = enum.auto()
    LISTENING = enum.auto()
    REFUSED = enum.auto()
    SILENT = enum.auto()


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of one probe; `why`, for people, if no task listens; `is_of_lookup` if the name is unknown."""

    state: State
    why: str = ""
    is_of_lookup: bool = False


def probe(address: str, timeout: float = _PROBE_SECS) -> ProbeResult:
    """Opens a connection to `address`, `host:port`, and closes it, within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    host, port = host_and_port(address)
    try:
        found = address_info(host, port, timeout)
    except (OSError, UnicodeError):
        return ProbeResult(State.SILENT, f"the name {host} has not been resolved", is_of_lookup=True)
    why = ProbeResult(State.SILENT, f"{address} has not responded")
    for family, kind, protocol, _, socket_address in found:
        try:
            own = socket.socket(family, kind, protocol)
        except OSError:
            # This process can open no more files at the moment, or the system has no IPv6.
            continue
        with own:
            own.settimeout(max(0.01, deadline - time.monotonic()))
            in_use.add(inode := os.fstat(own.fileno()).st_ino)
            try:
                own.connect(socket_address)
                return ProbeResult(State.LISTENING)
            except ConnectionRefusedError:
                why = ProbeResult(State.REFUSED, f"nothing listens at {address}")
            except OSError:
                # No route, or no response in time; it may have arrived while this process could not run.
                with suppress(OSError):
                    own.getpeername()
                    return ProbeResult(State.LISTENING)
            finally:
                in_use.discard(inode)
    return why


def accepts_connections(address: str, timeout: float = _PROBE_SECS) -> bool:
    return probe(address, timeout).state is State.LISTENING


def not_met(missing: Mapping[Task, str], why: Mapping[Task, str], timeout: float) -> ClusterError:
    """The error for the `missing` tasks at their addresses, with the results of their last probes."""
    names = ", ".join(f"{task} ({address})" for task, address in missing.items())
    tried = "; ".join(why[task] for task in missing if why.get(task))
    end = f": {tried}" if tried else ""
    return ClusterError(f"{names} did not respond within {timeout:g} s (cluster.start_timeout){end}")


class SilenceTimer:
    """Measures the silence of a task from its probes; after `patience` seconds of it, the task counts as lost.

    Time between probes in which this process did not run does not count: it was this process that was away. Time in
    which the system tries to connect does. `last` is the newest probe.
    """

    def __init__(self, patience: float) -> None:
        self.last = ProbeResult(State.UNKNOWN)
        self._patience = patience
        self._secs = 0.0

    def add(self, found: ProbeResult, secs: float) -> None:
        """Adds a probe that ended `secs` seconds after the previous one."""
        self._secs = self._secs + secs if found.state is State.SILENT else 0.0
        self.last = found

    @property
    def secs_left(self) -> float:
        return max(0.0, self._patience - self._secs)

    @property
    def is_silent(self) -> bool:
        """True while the task is silent, and not yet lost."""
        return self.last.state is State.SILENT and self.secs_left > 0

    @property
    def lost_because(self) -> str | None:
        """The reason why the task counts as lost; None if it does not."""
        if self.last.state is State.REFUSED:
            return self.last.why
        is_lost = self.last.state is State.SILENT and not self.is_silent
        return f"{self.last.why} for {self._patience:g} s, cluster.patience" if is_lost else None


class PortProbes:
    """Probes tasks, `host:port` by task, continuously, one thread each, so that nothing waits for a silent one."""

    def __init__(
        self, addresses: Mapping[Task, str], patience: float, probe: Callable[[str, float], ProbeResult] = probe
    ) -> None:
        self._probe = probe
        self._patience = patience
        self._timers: dict[Task, SilenceTimer] = {}
        self._stopped = threading.Event()
        for task, address in addresses.items():
            self.add(task, address)

    def add(self, task: Task, address: str) -> None:
        """Probes a task as well, in the place of another one of its name."""
        timer = SilenceTimer(self._patience)
        self._timers = {**self._timers, task: timer}
        threading.Thread(target=self._work, args=[address, task, timer], daemon=True).start()

    def remove(self, task: Task) -> None:
        """Probes a task no longer."""
        self._timers = {other: timer for other, timer in self._timers.items() if other != task}

    def listening(self) -> set[Task]:
        return {task for task, timer in self._timers.items() if timer.last.state is State.LISTENING}

    def refusing(self) -> set[Task]:
        """The tasks that refused a connection when they were last probed: their processes have exited."""
        return {task for task, timer in self._timers.items() if timer.last.state is State.REFUSED}

    def silent(self) -> set[Task]:
        """The tasks that do not respond at present, and are not lost yet."""
        return {task for task, timer in self._timers.items() if timer.is_silent}

    def lost(self) -> dict[Task, str]:
        """The tasks that refused a connection, or were silent for too long, each with the reason."""
        return {task: why for task, timer in self._timers.items() if (why := timer.lost_because) is not None}

    def found(self) -> dict[Task, str]:
        """The reasons that the last probes gave, by task; empty for one that listens, or was not probed yet."""
        return {task: timer.last.why for task, timer in self._timers.items()}

    def stop(self) -> None:
        self._stopped.set()

    def _work(self, address: str, task: Task, timer: SilenceTimer) -> None:
        pause = 0.0
        while not self._stopped.wait(pause) and self._timers.get(task) is timer:
            # The last probe before the end of patience ends with it.
            left = timer.secs_left - _PAUSE_SECS
            timeout = min(_PROBE_SECS, left) if left > 0 else _PROBE_SECS
            began = time.monotonic()
            found = self._probe(address, timeout)
            took = time.monotonic() - began
            timer.add(found, pause + (min(timeout, took) if found.is_of_lookup else took))
            pause = _PAUSE_SECS


def wait_for_all(tasks: Mapping[Task, str], timeout: float) -> None:
    """Returns when all of the tasks, `host:port` by task, listen; raises `ClusterError` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    missing = dict(tasks)
    while True:
        probes = {task: in_thread(partial(probe, address)) for task, address in missing.items()}
        found = {task: outcome.result() for task, outcome in probes.items()}
        missing = {task: missing[task] for task in missing if found[task].state is not State.LISTENING}
        if not missing:
            return
        if time.monotonic() > deadline:
            raise not_met(missing, {task: found[task].why for task in missing}, timeout)
        time.sleep(_MEET_POLL_SECS)
