"""`Restarts`: how often a run has resumed after failures of its cluster, and whether it may do so again."""

from __future__ import annotations

from kdist.errors import ClusterError, TornUpdateError


class Restarts:
    """Counts them.

    Args:
        at_most: how often the run may resume.
        may_restart_tasks: whether it also resumes after failures that did not leave the tasks running.

    Attributes:
        at_most: as given.
        count: how often it has resumed.
        on_new_clusters: how often of these on a new cluster.
        of_workers: how many workers were restarted in the clusters before the current one.
    """

    def __init__(self, at_most: int, *, may_restart_tasks: bool) -> None:
        self.at_most = at_most
        self.count = self.on_new_clusters = self.of_workers = 0
        self._may_restart_tasks = may_restart_tasks

    def may_follow(self, error: ClusterError) -> bool:
        """Whether the run may resume after `error`, if there is a checkpoint."""
        return self.count < self.at_most and (isinstance(error, TornUpdateError) or self._may_restart_tasks)
