"""One cluster over the hosts of a network: a command a task, as people and schedulers start them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from drilling import Report
from helpers import descendants, environment, result_of, wait_until
from network import Host, Network, why_not

PORT = 2222
CHIEF_PORT = 2230
#: Seconds for processes that come up on a machine that has other things to do.
PATIENCE = 120.0

#: A small model of the tests' own; validated rarely, so that steps take the time.
MINE = (
    "model._target_=user_code.build",
    "data._target_=user_code.data",
    "run.trust=[user_code]",
    "train.steps_per_epoch=2000",
    "run.dir=D",
)


@dataclass(frozen=True)
class Ended:
    """The outcome of a cluster.

    Attributes:
        codes: exit codes by task.
        console: what the chief printed.
        result: the chief's `result.json`; empty if there is none.
        seconds: from the start of the first task to the end of the last.
    """

    codes: dict[str, int]
    console: str
    result: dict[str, Any]
    seconds: float

    @property
    def step(self) -> int | None:
        return self.result.get("global_step")


@dataclass
class HostCluster:
    """The tasks of one cluster.

    Args:
        network: whose hosts they are on.
        tasks: hosts by task, as `ps:0`, `worker:1`, `chief`; without a chief of its own worker 0 is the chief.
        arguments: of every command.
        by_tf_config: whether the tasks are told who they are by TF_CONFIG.
        run: tells files of clusters that follow each other apart.
    """

    network: Network
    tasks: Mapping[str, Host]
    arguments: tuple[str, ...] = ()
    by_tf_config: bool = False
    run: int = 0
    _commands: dict[str, Command] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    #: Every process that was seen of it, with what it was started as.
    _seen: dict[int, str] = field(default_factory=dict)

    @property
    def chief(self) -> str:
        return "chief" if "chief" in self.tasks else "worker:0"

    @property
    def run_dir(self) -> Path:
        return self.tasks[self.chief].disk / "D"

    def start(self, *tasks: str) -> None:
        """Starts tasks, all if none is named."""
        for task in tasks or self.tasks:
            host = self.tasks[task]
            self._console(task).parent.mkdir(parents=True, exist_ok=True)
            self._console(task).write_text("")
            self._commands[task] = Command(
                *MINE,
                *self._membership(task),
                *self.arguments,
                cwd=self.network.disk,
                stdout=self._console(task),
                env={**environment(), **self._variables(task)},
                host=host.pid,
            )

    def join(self, name: str, host: Host, *arguments: str) -> None:
        """Starts a task that knows the address of the chief alone; `name` is its job, and tells it from others."""
        (chief,) = self._addresses().get("chief") or self._addresses()["worker"][:1]
        self._console(name).write_text("")
        job = name.partition(":")[0]
        membership = ["cluster=hosts", f"cluster.job={job}", f"cluster.chief={chief}"]
        self._commands[name] = Command(
            *MINE,
            *membership,
            *self.arguments,
            *arguments,
            cwd=self.network.disk,
            stdout=self._console(name),
            env=environment(),
            host=host.pid,
        )

    def said(self, task: str) -> str:
        """The text that a task has printed so far."""
        return self._console(task).read_text()

    def wait_for(self, pattern: str, task: str | None = None, timeout: float = PATIENCE) -> str:
        """Waits until a task, the chief if none is named, has printed what matches `pattern`; returns that."""
        name = task or self.chief
        found: list[str] = []

        def is_there() -> bool:
            if match := re.search(pattern, self.said(name), re.MULTILINE):
                found.append(match[0])
            assert found or self._commands[name].poll() is None, f"{name} ended without {pattern!r}:\n{self.all_said()}"
            return bool(found)

        wait_until(is_there, timeout, lambda: f"{pattern!r} in what {name} says:\n{self.all_said()}")
        return found[0]

    def wait_for_step(self, step: int) -> int:
        """Waits until the chief has said that training is at `step` or later; returns the newest step it said."""
        wait_until(
            lambda: self.newest_step() >= step or self._commands[self.chief].poll() is not None,
            PATIENCE,
            lambda: f"step {step} in:\n{self.all_said()}",
        )
        assert self.newest_step() >= step, f"the chief ended before step {step}:\n{self.all_said()}"
        return self.newest_step()

    def newest_step(self) -> int:
        """The newest step that the chief has said."""
        steps = re.findall(r"^train \| step +(\d+)", self.said(self.chief), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def pids(self, task: str) -> list[int]:
        """The processes of a task: its command, and all that it has started."""
        command = self._commands[task]
        return [command.pid, *descendants(command.pid)] if command.poll() is None else []

    def signal_all(self, *numbers: signal.Signals) -> None:
        """Sends signals to every process of every task, as a scheduler does, 10 ms apart if they are several."""
        pids = [pid for task in self._commands for pid in self.pids(task)]
        for place, number in enumerate(numbers):
            time.sleep(0.01 * bool(place))
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self, task: str) -> None:
        """Kills every process of a task, as the end of its host does."""
        for pid in self.pids(task):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._commands[task].wait(10)

    def code_of(self, task: str, timeout: float = PATIENCE) -> int:
        """The exit code of a task, once there is one."""
        command = self._commands[task]
        self._look()
        wait_until(lambda: command.poll() is not None, timeout, lambda: f"{task} ends:\n{self.all_said()}")
        return command.wait()

    def end(self, timeout: float = PATIENCE) -> Ended:
        """Waits until all tasks have ended, and that nothing of them is left 5 s later."""
        deadline = time.monotonic() + timeout
        codes = {task: self.code_of(task, max(1.0, deadline - time.monotonic())) for task in self._commands}
        seconds = time.monotonic() - self._started
        wait_until(lambda: not self._left(), 5, lambda: f"no process is left: {self._left()}")
        has_result = (self.run_dir / "result.json").exists()
        return Ended(codes, self.said(self.chief), result_of(self.run_dir) if has_result else {}, seconds)

    def abandon(self) -> None:
        """Kills what is left, by its own process id."""
        for task in self._commands:
            self.kill(task)

    def all_said(self) -> str:
        """The text that all tasks have printed, for a message of a test that failed."""
        return "\n".join(f"--- {task}\n{self.said(task)}" for task in self._commands)

    def _look(self) -> None:
        for task in self._commands:
            self._seen |= {pid: _started_at(pid) for pid in self.pids(task)}

    def _left(self) -> list[int]:
        return [pid for pid, started in self._seen.items() if started and _started_at(pid) == started]

    def _console(self, task: str) -> Path:
        return self.network.disk.parent / f"said-{self.run}" / f"{task.replace(':', '-')}.txt"

    def _addresses(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for task, host in self.tasks.items():
            job = task.partition(":")[0]
            # Two tasks of one host have two ports.
            port = PORT + [name for name, other in self.tasks.items() if other is host].index(task)
            found.setdefault(job, []).append(f"{host.name}:{port}")
        return found

    def _membership(self, task: str) -> list[str]:
        if self.by_tf_config:
            return ["cluster=tf_config", f"cluster.chief_port={CHIEF_PORT}"]
        job, _, index = task.partition(":")
        addresses = self._addresses()
        keys = [f"cluster.{name}=[{','.join(hosts)}]" for name, hosts in addresses.items() if name != "chief"]
        keys += [f"cluster.chief={address}" for address in addresses.get("chief", [])]
        keys += [f"cluster.job={job}", f"cluster.task={index or 0}", f"cluster.chief_port={CHIEF_PORT}"]
        return ["cluster=hosts", *keys]

    def _variables(self, task: str) -> dict[str, str]:
        if not self.by_tf_config:
            return {}
        job, _, index = task.partition(":")
        given = {"cluster": self._addresses(), "task": {"type": job, "index": int(index or 0)}}
        return {"TF_CONFIG": json.dumps(given)}


class Hosts:
    """Makes networks and clusters on them, and removes all of it at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network: Network | None = None
        self._clusters: list[HostCluster] = []
        self.reports: list[Report] = []

    def network(self, num_hosts: int, **options: Any) -> Network:
        """The hosts of this test; `options` are those of `Network`."""
        if (reason := why_not()) is not None:
            pytest.skip(reason)
        self._network = Network(num_hosts, self._folder, **options)
        return self._network

    def cluster(self, network: Network, tasks: dict[str, Host], *arguments: str, **options: Any) -> HostCluster:
        """A cluster, not started; `options` are those of `HostCluster`."""
        cluster = HostCluster(network, tasks, arguments, run=len(self._clusters), **options)
        self._clusters.append(cluster)
        return cluster

    def report(self, number: int, fault: str, happened: str, ended: Ended, code: int | None = None) -> None:
        """Adds a row to the table of drills; the code is that of the chief."""
        chief = self._clusters[-1].chief
        found = ended.codes[chief] if code is None else code
        self.reports.append(Report(number, fault, happened, ended.step, ended.seconds, found))

    def remove(self) -> None:
        for cluster in self._clusters:
            cluster.abandon()
        if self._network is not None:
            self._network.close()


_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def try_to_connect(host: Host, address: str, port: int) -> str:
    """The outcome of a connection that a host tries to open: `connected`, or the name of Python's error."""
    return host.do(sys.executable, "-c", _CONNECT, address, str(port)).strip()


def four(network: Network) -> dict[str, Host]:
    """`2ps2w` on four hosts; worker 0 is the chief as well."""
    return dict(zip(("worker:0", "worker:1", "ps:0", "ps:1"), network.hosts))


def three(network: Network) -> dict[str, Host]:
    """`3w` on three hosts."""
    return {f"worker:{index}": host for index, host in enumerate(network.hosts[:3])}


def _started_at(pid: int) -> str:
    """The time at which a process was started; empty if it is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
