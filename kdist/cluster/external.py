"""`ExternalCluster`: the chief's side of a cluster of externally started tasks, on any machines."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kdist.cluster.description import TaskFingerprint
from kdist.cluster.network.names import check_private, environment_with, host_and_port, without_proxy
from kdist.cluster.network.port_probe import PortProbes, accepts_connections, not_met
from kdist.cluster.network.sockets import bind_to, held_ports
from kdist.cluster.network.tcp_timeouts import TcpTimeouts
from kdist.cluster.processes.chief_board import AskedByTasks, VersionCheck, chief_server, tell_tasks
from kdist.cluster.processes.child import end_children, start_child, task_environment
from kdist.cluster.processes.server import TaskOptions
from kdist.cluster.spec import Cluster, ClusterSpec, Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ClusterError, ConfigError
from kdist.log import warn

_STOP_SECS = 5.0
_POLL_SECS = 0.2


@contextmanager
def chief_address_of(address: str, config: ClusterConfig) -> Iterator[str]:
    """Keeps a port for the process of the chief, whose server is at `address`: the others connect to it, too.

    Yields:
        `host:port`, with the name by which the others know this host.
    """
    with held_ports(0 if config.chief_port else 1) as free:
        yield f"{address.rpartition(':')[0]}:{config.chief_port or free[0]}"


class ExternalCluster(Cluster):
    """Waits for the tasks of `spec`, and releases them at the end.

    The chief's own server (that of worker 0, if the chief is worker 0 as well) is a child process, whose log is in
    `log_dir`.

    Args:
        fingerprint: to compare with the tasks; None compares nothing.
        chief_address: `host:port` at which this process serves already; None lets TensorFlow serve at a free port.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        log_dir: Path,
        config: ClusterConfig,
        fingerprint: TaskFingerprint | None = None,
        chief_address: str | None = None,
    ) -> None:
        self.spec, self._log_dir, self._config, self._fingerprint = spec, log_dir, config, fingerprint
        self.any_chief_port = config.chief_port is None
        #: Whether the chief's own server is that of a worker.
        self._computes = chief_address is None
        self.chief_address = chief_address or ""
        self._address, self._own_task = chief_server(spec)
        self._version_check: VersionCheck | None = None
        self._asked: AskedByTasks | None = None
        #: The addresses of tasks that were given a place, and until when they have to take it.
        self._joining: dict[Task, tuple[str, float]] = {}
        self._at_end = ExitStack()
        self._is_launched = self._all_there = False

    def launch(self) -> None:
        """Starts the chief's own server and returns at once."""
        config, address, task = self._config, self._address, self._own_task
        bind_to(config.bind)
        self._at_end.enter_context(environment_with(without_proxy(self.spec.addresses.values())))
        if accepts_connections(address):
            raise ClusterError(f"{task} cannot serve at {address}: the address is in use")
        if self._computes:
            self.chief_address = self._at_end.enter_context(chief_address_of(address, config))
        port = host_and_port(self.chief_address)[1]
        jobs = {"chief": [address]} if task.is_chief else self.spec.jobs
        options = TaskOptions(jobs, task.job, task.index, patience=config.patience)
        log = self._log_dir / f"{task.job}-{task.index}-server.log"
        log.unlink(missing_ok=True)
        self._own = start_child(
            [sys.executable, "-m", "kdist.cluster.processes.server", options.to_json()],
            log,
            start_timeout=config.start_timeout,
            stdout=subprocess.DEVNULL,
            env=task_environment(task, config.devices) | ({} if self._computes else {"CUDA_VISIBLE_DEVICES": ""}),
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
        self._asked = AskedByTasks(self.spec)
        self._at_end.callback(self._asked.stop)

    def tasks_to_leave(self) -> set[Task]:
        return set() if self._asked is None else self._asked.leaving() & set(self.spec.tasks)

    def tasks_to_join(self) -> Counter[str]:
        asked = [] if self._asked is None else [job for _, job, _ in self._asked.joining]
        return Counter([*asked, *(task.job for task in self._returning())])

    def refuse_to_join(self, why: str) -> None:
        if self._asked is not None:
            self._asked.refuse(why)
        for task in self._returning():
            self._let_go(task)

    def _returning(self) -> list[Task]:
        """The tasks that have left and were started again, by whoever starts them, for the same place."""
        if (check := self._version_check) is None:
            return []
        return [task for task in sorted(self.spec.left - self._joining.keys(), key=str) if check.has_reported(task)]

    def _let_go(self, task: Task) -> None:
        """Tells a task that the cluster does without it."""
        self.answer(task, {"left": True})

    def waiting(self) -> set[Task]:
        """The tasks of the cluster that have compared themselves, and have not been answered since."""
        check = self._version_check
        return set() if check is None else {task for task in self.spec.tasks if check.has_reported(task)}

    def answer(self, task: Task, answer: Mapping[str, Any]) -> None:
        """Answers a task that has compared itself; its next report is a new one."""
        name = None if self._version_check is None else self._version_check.forget(task)
        if self._asked is not None and name is not None:
            self._asked.answer(name, answer)

    def end_round(self, number: int) -> None:
        """Ends a round of all-reduce for the workers that wait in it."""
        if self._asked is not None:
            self._asked.end_round(number)

    @property
    def meeting_place(self) -> str | None:
        return self._address

    def check_leaving(self, leaving: Collection[Task]) -> None:
        if self._own_task in leaving:
            raise ConfigError(f"{self._own_task} is the chief as well, and cannot leave; to end the run, stop it")

    def begin_to_add(self, num_ps: int, num_workers: int) -> list[Task]:
        assert self._asked is not None
        wanted = [*["ps"] * num_ps, *["worker"] * num_workers]
        waiting, returning = self._asked.joining, self._returning()
        if Counter(wanted) - self.tasks_to_join():
            return super().begin_to_add(num_ps, num_workers)
        if not self._config.allow_unprotected_network:
            check_private({Task(job, index): address for index, (_, job, address) in enumerate(waiting)})
        addresses, given = dict[Task, str](), dict[Task, tuple[str, str, str]]()
        for job, number in (("ps", num_ps), ("worker", num_workers)):
            own = [task for task in returning if task.job == job][:number]
            addresses |= {task: self.spec.address(task) for task in own}
            for task in self.spec.free_places(job, number - len(own), but=returning):
                given[task] = next(asked for asked in waiting if asked[1] == job)
                waiting.remove(given[task])
                addresses[task] = given[task][2]
                if self._version_check is not None:
                    self._version_check.forget(task)
        spec = self.spec.with_tasks(addresses)
        deadline = time.monotonic() + self._config.start_timeout
        for task, address in addresses.items():
            self._joining[task] = address, deadline
            self._probes.add(task, address)
            self._tcp_timeouts.add(address)
            self._at_end.enter_context(environment_with(without_proxy([address])))
        for task, (name, _, _) in given.items():
            place = {"index": task.index, "ps": spec.ps, "worker": spec.worker, "chief": spec.chief}
            self._asked.answer(name, place)
        return list(addresses)

    def are_ready(self, joining: Collection[Task]) -> bool:
        found, check = self._probes.found(), self._version_check
        for task in joining:
            address, deadline = self._joining[task]
            if check is not None and (differs := check.mismatches.get(str(task))):
                raise ClusterError(f"{task} at {address} differs from the chief: {'; '.join(differs)}")
            if time.monotonic() > deadline:
                raise not_met({task: address}, found, self._config.start_timeout)
        serve = self._probes.listening().issuperset(joining)
        return serve and (check is None or all(map(check.has_reported, joining)))

    def admit(self, joining: Collection[Task]) -> None:
        self.spec = self.spec.with_tasks({task: self._joining.pop(task)[0] for task in joining})

    def dismiss(self, leaving: Collection[Task]) -> None:
        self.spec = self.spec.without([task for task in leaving if task not in self._joining])
        for task in leaving:
            self._joining.pop(task, None)
            self._probes.remove(task)
            self._let_go(task)

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
        return {task: f"is lost ({why})" for task, why in lost.items() if task not in self._joining}

    def silent_tasks(self) -> set[Task]:
        return self._probes.silent() - self._joining.keys() if self._all_there else set()

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
