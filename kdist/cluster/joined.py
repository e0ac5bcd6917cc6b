"""`JoinedCluster`: a cluster whose tasks others start, on this machine or not. The chief's side of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kdist.cluster.notice import chief_server, tell_tasks
from kdist.cluster.process import end_children, how_it_ended, task_environment
from kdist.cluster.rendezvous import accepts_connections
from kdist.cluster.server import ServerOptions
from kdist.cluster.spec import ClusterSpec, Task
from kdist.errors import ClusterError

if TYPE_CHECKING:
    from kdist.schema import DevicesConfig

_STOP_SECS = 5.0
_POLL_SECS = 0.2


class JoinedCluster:
    """Waits for the tasks of `spec`, and lets them go at the end.

    The chief's own server, that of worker 0 if the chief is that as well, is a child process.

    Args:
        spec: addresses of all tasks.
        log_dir: folder for the log of the chief's own server.
        start_timeout: seconds within which every task must serve.
        devices: which GPUs tasks may use.
    """

    def __init__(
        self, spec: ClusterSpec, log_dir: Path, *, start_timeout: float, devices: DevicesConfig | None = None
    ) -> None:
        self.spec = spec
        self._log_dir = log_dir
        self._start_timeout = start_timeout
        self._devices = devices
        self._own: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._all_there = False

    def launch(self) -> None:
        """Starts the chief's own server and returns at once."""
        self._deadline = time.monotonic() + self._start_timeout
        address, task = chief_server(self.spec)
        if accepts_connections(address):
            raise ClusterError(f"{task} cannot serve at {address}: the address is in use")
        jobs = {"chief": [address]} if task.is_chief else self.spec.jobs
        options = ServerOptions(jobs, task.job, task.index, intra_op_threads=0, inter_op_threads=0)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._log = self._log_dir / f"{task.job}-{task.index}-server.log"
        with self._log.open("wb") as log:
            self._own = subprocess.Popen(
                [sys.executable, "-m", "kdist.cluster.server", options.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=task_environment(task, self._devices),
                start_new_session=True,
            )

    def wait(self) -> None:
        """Waits until every task serves.

        Raises:
            ClusterError: names those that do not within the time.
        """
        missing = self._addresses()
        while missing := {task: address for task, address in missing.items() if not accepts_connections(address)}:
            if self._own is not None and (code := self._own.poll()) is not None:
                own = chief_server(self.spec)[1]
                raise ClusterError(f"{own} ended while it started ({how_it_ended(code)})\n  log: {self._log}")
            if time.monotonic() > self._deadline:
                names = ", ".join(f"{task} ({address})" for task, address in missing.items())
                raise ClusterError(f"{names} did not answer within {self._start_timeout:g} s (cluster.start_timeout)")
            time.sleep(_POLL_SECS)
        self._all_there = True

    def lost_tasks(self) -> dict[Task, str]:
        """The tasks at whose addresses nobody listens any more."""
        return {
            task: f"nobody listens at {address}"
            for task, address in self._addresses().items()
            if self._all_there and not accepts_connections(address)
        }

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        """Kills what is a child of this process; that is not all."""
        if self._own is not None and tasks is None:
            self._own.kill()
        return False

    @property
    def pids(self) -> dict[Task, int]:
        """None: the tasks are others'."""
        return {}

    def restart(self, task: Task) -> bool:
        """Others start the tasks; one that they start again is taken back."""
        return False

    def starting_tasks(self) -> set[Task]:
        """None that is known of: those that do not serve yet count as lost."""
        return set()

    def stop(self) -> None:
        """Tells the tasks that the chief is done, and ends the chief's own server. May be called again."""
        if self._own is None:
            return
        if self._own.poll() is None:
            tell_tasks(self.spec, _STOP_SECS)
        end_children([self._own], _STOP_SECS)
        self._own = None

    def _addresses(self) -> dict[Task, str]:
        addresses = {task: self.spec.address(task) for task in self.spec.shape.tasks}
        if self.spec.chief:
            addresses[Task("chief", 0)] = self.spec.chief
        return addresses
