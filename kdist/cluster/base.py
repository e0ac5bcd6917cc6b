"""`Cluster`: what the chief needs of a cluster, whether it starts the tasks itself or others do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from kdist.cluster.spec import ClusterSpec, Task


class Cluster(Protocol):
    """Where the tasks are: started by this process, or by others."""

    spec: ClusterSpec
    #: `host:port` at which the tasks reach this process; known when it is launched.
    chief_address: str
    #: Whether they reach it at any other port as well.
    any_chief_port: bool
    #: The network interface at which all listen, see `kdist.cluster.network.bind`; None for all.
    bind: str | None

    def launch(self) -> None:
        """Starts the tasks that this process has to start, and returns at once."""

    def wait(self) -> None:
        """Waits until every task serves, at most for its `start_timeout`."""

    def lost_tasks(self) -> dict[Task, str]:
        """The tasks that are lost, each with a predicate that says how: `died (exit code 1)`."""

    def silent_tasks(self) -> set[Task]:
        """The tasks that do not respond, and do not count as lost yet."""

    def starting_tasks(self) -> set[Task]:
        """The tasks that were restarted and do not serve yet."""

    def cut_off(self, task: Task) -> None:
        """Closes the connections with a task that is lost, if it may be silent, so that nothing waits for it."""

    def let_in(self, task: Task) -> None:
        """Undoes `cut_off`: the task has returned."""

    def restart(self, task: Task) -> bool:
        """Restarts a lost task at its address and returns at once; False if this process may not."""

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        """Kills tasks, all if None; False if others started some of them."""

    @property
    def pids(self) -> Mapping[Task, int]:
        """Process ids of the tasks that this process started."""

    def stop(self, *, run_goes_on: bool = False) -> None:
        """Stops the cluster; may be called repeatedly.

        Args:
            run_goes_on: whether the run is not at its end, so that another chief will resume it.
        """
