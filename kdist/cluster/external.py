"""`ExternalCluster`: the chief's side of a cluster of externally started tasks, on any machines."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from kdist.cluster.description import TaskFingerprint
from kdist.cluster.network.names import environment_with, without_proxy
from kdist.cluster.network.port_probe import PortProbes, accepts_connections, not_met
from kdist.cluster.network.sockets import bind_to, held_ports
from kdist.cluster.network.tcp_timeouts import TcpTimeouts
from kdist.cluster.processes.chief_board import VersionCheck, chief_server, tell_tasks
from kdist.cluster.processes.child import end_children, start_child, task_environment
from kdist.cluster.processes.server import TaskOptions
from kdist.cluster.spec import Cluster, ClusterSpec, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ClusterError
from kdist.log import warn

_STOP_SECS = 5.0
_POLL_SECS = 0.2


class ExternalCluster(Cluster):
    """Waits for the tasks of `spec`, and releases them at the end.

    The chief's own server (that of worker 0, if the chief is worker 0 as well) is a child process, whose log is in
    `log_dir`. A `fingerprint` of None compares nothing.
    """

    def __init__(
        self, spec: ClusterSpec, log_dir: Path, config: ClusterConfig, fingerprint: TaskFingerprint | None = None
    ) -> None:
        self.spec, self._log_dir, self._config, self._fingerprint = spec, log_dir, config, fingerprint
        self.any_chief_port = config.chief_port is None
        self._address, self._own_task = chief_server(spec)
        self._version_check: VersionCheck | None = None
        self._at_end = ExitStack()
        self._is_launched = self._all_there = False

    def launch(self) -> None:
        """Starts the chief's own server and returns at once."""
        config, address, task = self._config, self._address, self._own_task
        bind_to(config.bind)
        self._at_end.enter_context(environment_with(without_proxy(self.spec.addresses.values())))
        if accepts_connections(address):
            raise ClusterError(f"{task} cannot serve at {address}: the address is in use")
        port = config.chief_port or self._at_end.enter_context(held_ports(1))[0]
        # The name by which the others know this host: they connect to this process, too.
        self.chief_address = f"{address.rpartition(':')[0]}:{port}"
        jobs = {"chief": [address]} if task.is_chief else self.spec.jobs
        options = TaskOptions(jobs, task.job, task.index, patience=config.patience)
        log = self._log_dir / f"{task.job}-{task.index}-server.log"
        log.unlink(missing_ok=True)
        self._own = start_child(
            [sys.executable, "-m", "kdist.cluster.processes.server", options.to_json()],
            log,
            start_timeout=config.start_timeout,
            stdout=subprocess.DEVNULL,
            env=task_environment(task, config.devices),
        )
        self._at_end.callback(end_children, [self._own], _STOP_SECS)
        self._probes = PortProbes(self.spec.addresses, config.patience)
        self._at_end.callback(self._probes.stop)
        self._tcp_timeouts = TcpTimeouts(self.spec.addresses.values(), [port], config.patience)
        self._tcp_timeouts.start()
        self._at_end.callback(self._tcp_timeouts.stop)
        self._is_launched = True

    def wait(self) -> None:
        """Waits until every task serves, and has compared itself with this process; errors name those that have not."""
        while missing := self._missing():
            if self._own.poll() is not None:
                raise ClusterError(
                    f"{self._own_task} exited while starting ({self._own.how_it_ended()}){self._own.log_tail()}"
                )
            if self._own.is_late:
                late = {task: address for task, address in self.spec.addresses.items() if task in missing}
                why = "it listens, but has not compared itself with the chief"
                silent = dict.fromkeys(self._probes.listening(), why)
                raise not_met(late, self._probes.found() | silent, self._config.start_timeout)
            time.sleep(_POLL_SECS)
        self._all_there = True

    def _missing(self) -> set[Task]:
        tasks, own = self.spec.addresses.keys(), self._own_task
        missing = tasks - self._probes.listening()
        if self._fingerprint is None:
            return missing
        if self._version_check is None:
            if own in missing:
                return missing
            self._version_check = VersionCheck(self.spec, self._fingerprint)
        return missing | self._version_check.missing(tasks - {own})

    def lost_tasks(self) -> dict[Task, str]:
        """The tasks that refuse connections, or have been silent for longer than `patience`."""
        lost = self._probes.lost() if self._all_there else {}
        return {task: f"is lost ({why})" for task, why in lost.items()}

    def silent_tasks(self) -> set[Task]:
        return self._probes.silent() if self._all_there else set()

    def disconnect(self, task: Task) -> None:
        self._tcp_timeouts.disconnect(self.spec.address(task))

    def reconnect(self, task: Task) -> None:
        self._tcp_timeouts.reconnect(self.spec.address(task))

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        """Kills the child of this process; the other tasks are not its own."""
        if self._is_launched and tasks is None:
            self._own.kill()
        return False

    def stop(self, *, will_resume: bool = False) -> None:
        """Tells the tasks that the chief has finished, and stops the chief's own server."""
        if self._is_launched and self._own.poll() is None:
            others = self.spec.addresses.keys() - self._probes.lost() - {self._own_task}
            if self._version_check is not None:
                others = {task for task in others if str(task) not in self._version_check.mismatches}
            # A task that returns in time should learn that the chief has finished, not find that it has disappeared.
            timeout = max(_STOP_SECS, self._config.patience) if self._probes.silent() else _STOP_SECS
            if missing := tell_tasks(self.spec, others, timeout, will_resume=will_resume):
                warn(f"{', '.join(sorted(missing))} did not acknowledge that training has finished")
        self._is_launched = False
        self._at_end.close()
