"""Tasks that are lost, those that are started again, and how often, without any process."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

import pytest
import tensorflow as tf

from kdist.cluster.spec import ClusterSpec, Task
from kdist.dispatch.coordinator import may_be_lost
from kdist.dispatch.health import Supervisor
from kdist.errors import ClusterError

PS, W0, W1 = Task("ps", 0), Task("worker", 0), Task("worker", 1)


class FakeCluster:
    """Tasks that are lost and come back when a test says so."""

    spec = ClusterSpec(("h:1",), ("h:2", "h:3"))

    def __init__(self, *, is_ours: bool = True) -> None:
        self.lost: dict[Task, str] = {}
        self.starting: set[Task] = set()
        self.restarted: list[Task] = []
        self._is_ours = is_ours

    def launch(self) -> None: ...
    def wait(self) -> None: ...
    def stop(self) -> None: ...

    def lost_tasks(self) -> dict[Task, str]:
        return dict(self.lost)

    def starting_tasks(self) -> set[Task]:
        return set(self.starting)

    def restart(self, task: Task) -> bool:
        if self._is_ours:
            self.restarted.append(task)
            del self.lost[task]
            self.starting.add(task)
        return self._is_ours

    def kill(self, tasks: Collection[Task] | None = None) -> bool:
        return self._is_ours

    @property
    def pids(self) -> Mapping[Task, int]:
        return {}


def test_a_lost_worker_is_started_again_and_back_when_it_serves() -> None:
    cluster = FakeCluster()
    supervisor = Supervisor(cluster, max_worker_restarts=2)
    assert supervisor.check() == [0, 1]
    cluster.lost = {W1: "died (signal 9, SIGKILL)"}
    with pytest.warns(UserWarning, match=r"worker:1 died \(signal 9, SIGKILL\); restarting \(1 of 2\)"):
        assert supervisor.check() == [0]
    assert supervisor.check() == [0]
    cluster.starting.clear()
    with pytest.warns(UserWarning, match="worker:1 is back after"):
        assert supervisor.check() == [0, 1]
    assert (cluster.restarted, supervisor.restarts) == ([W1], 1)


def test_each_worker_is_started_so_often_and_then_done_without() -> None:
    cluster = FakeCluster()
    supervisor = Supervisor(cluster, max_worker_restarts=1)
    cluster.lost = {W1: "died (signal 9, SIGKILL)"}
    with pytest.warns(UserWarning, match="1 of 1"):
        supervisor.check()
    # It ends again while it starts.
    cluster.starting.clear()
    cluster.lost = {W1: "died (exit code 1)"}
    with pytest.warns(UserWarning, match=r"worker:1 died \(exit code 1\); training continues without it"):
        assert supervisor.check() == [0]
    with warnings.catch_warnings():
        # It is said once.
        warnings.simplefilter("error")
        assert supervisor.check() == [0]
    cluster.lost |= {W0: "died (signal 9, SIGKILL)"}
    with pytest.warns(UserWarning, match=r"worker:0 died \(signal 9, SIGKILL\); restarting"):
        assert supervisor.check() == []


def test_when_no_worker_is_left_and_none_comes_that_is_an_error() -> None:
    cluster = FakeCluster()
    supervisor = Supervisor(cluster, max_worker_restarts=0)
    cluster.lost = {W0: "died (signal 9, SIGKILL)", W1: "died (signal 9, SIGKILL)"}
    with (
        pytest.warns(UserWarning, match="training continues without it"),
        pytest.raises(ClusterError, match=r"no worker is left: worker:0 died \(signal 9, SIGKILL\), worker:1 died"),
    ):
        supervisor.check()


def test_a_lost_server_is_an_error_whatever_the_workers_do() -> None:
    cluster = FakeCluster()
    cluster.lost = {PS: "died (signal 9, SIGKILL)", W1: "died (signal 9, SIGKILL)"}
    with pytest.raises(ClusterError, match=r"^ps:0 died \(signal 9, SIGKILL\)$"):
        Supervisor(cluster, max_worker_restarts=3).check()
    assert cluster.restarted == []


def test_a_worker_that_somebody_else_starts_again_is_taken_back() -> None:
    cluster = FakeCluster(is_ours=False)
    supervisor = Supervisor(cluster, max_worker_restarts=3)
    cluster.lost = {W1: "is lost (nothing listens at h:1)"}
    with pytest.warns(UserWarning, match="training continues without it"):
        assert supervisor.check() == [0]
    cluster.lost = {}
    with pytest.warns(UserWarning, match="worker:1 is back after"):
        assert supervisor.check() == [0, 1]
    assert supervisor.restarts == 1


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (tf.errors.UnavailableError(None, None, "failed to connect to all addresses"), True),
        (tf.errors.InvalidArgumentError(None, None, "Client for target /job:worker/task:1 not found."), True),
        (tf.errors.InvalidArgumentError(None, None, "Unable to find a context_id matching the specified one"), True),
        (tf.errors.InvalidArgumentError(None, None, "Received a label value of 9"), False),
        (ValueError("remote_handle"), False),
        (None, False),
    ],
)
def test_what_an_error_of_a_call_may_mean(error: BaseException | None, is_lost: bool) -> None:
    assert may_be_lost(error) is is_lost
