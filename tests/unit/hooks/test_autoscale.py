"""Autoscale: the number of workers follows what each of them brings, and servers are named in time."""

from types import SimpleNamespace
from typing import Any

import pytest

from kdist.cluster.spec import Task
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError
from kdist.hooks.autoscale import Autoscale, ServerWatch
from kdist.hooks.base import RunContext

RATES = {1: 100.0, 2: 190.0, 3: 250.0, 4: 255.0, 5: 300.0}


class Cluster:
    """A session on a cluster that trains at the rates of `RATES`, and does at once what is asked for."""

    def __init__(self, hook: Autoscale, workers: int, rates: dict[int, float]) -> None:
        self.hook, self.workers, self.rates = hook, workers, rates
        self.asked: list[tuple[int, str]] = []
        self.cluster = ClusterConfig()
        self.now = 0.0
        hook._clock = lambda: self.now
        hook.begin(self.as_session)
        hook.after_create_session(self.as_session)

    @property
    def as_session(self) -> Any:
        return self

    @property
    def strategy(self) -> Any:
        return SimpleNamespace(num_workers=self.workers, plan=None, pids={}, meeting_place=None)

    def print_line(self, line: str) -> None:
        raise AssertionError(line)

    def resize(self, workers: int, ps: int | None, why: str) -> None:
        self.asked.append((workers, why))
        self.change(workers, f"workers={workers}")

    def change(self, workers: int, change: str) -> None:
        self.workers = workers
        self.hook.after_resize(self.as_session, SimpleNamespace(change=change))  # type: ignore[arg-type]

    def train(self, secs: float) -> None:
        for _ in range(int(secs)):
            self.now += 1
            values = SimpleNamespace(warming_up=False, num_examples=self.rates[self.workers], seconds=1.0)
            self.hook.after_run(RunContext(self.as_session, 0, 1), values)  # type: ignore[arg-type]


def test_workers_are_added_as_long_as_each_brings_half_of_one() -> None:
    cluster = Cluster(Autoscale(max_workers=8, every_secs=5), 1, RATES)
    cluster.train(200)

    # The third brings 63 % of one of two; the fourth 6 % of one of three, which is less than a tenth.
    assert [workers for workers, _ in cluster.asked] == [2, 3, 4, 3]
    assert cluster.asked[-1][1] == "autoscale: worker 4 brings 6% of a worker's rate"


def test_a_worker_that_brings_less_than_half_stays_and_is_the_last_one() -> None:
    cluster = Cluster(Autoscale(every_secs=5), 1, {1: 100.0, 2: 130.0})
    cluster.train(200)

    assert [workers for workers, _ in cluster.asked] == [2]


def test_the_limits_hold_and_a_worker_that_was_told_to_leave_is_not_replaced() -> None:
    cluster = Cluster(Autoscale(min_workers=2, max_workers=3, every_secs=5), 1, RATES)
    cluster.train(50)
    assert [workers for workers, _ in cluster.asked] == [2, 3]
    cluster.change(2, "leave=worker:1")
    cluster.train(100)
    assert len(cluster.asked) == 2
    # But there are always as many as there have to be.
    cluster.change(1, "leave=worker:0")
    cluster.train(10)
    assert cluster.asked[2][0] == 2


def test_steps_that_prepare_functions_do_not_count() -> None:
    cluster = Cluster(Autoscale(every_secs=5), 1, RATES)
    for _ in range(20):
        cluster.now += 1
        values = SimpleNamespace(warming_up=True, num_examples=1.0, seconds=1.0)
        cluster.hook.after_run(RunContext(cluster.as_session, 0, 1), values)  # type: ignore[arg-type]
    assert cluster.asked == []


WRONG: list[dict[str, Any]] = [
    {"min_workers": 0},
    {"max_workers": 0},
    {"every_secs": 0.0},
    {"min_workers": 3, "max_workers": 2},
    {"ps": "x"},
]


@pytest.mark.parametrize("given", WRONG)
def test_wrong_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"hooks.autoscale\."):
        Autoscale(**given)


def test_a_hotspot_and_the_end_of_memory_are_told_once() -> None:
    cpu, size = {1: 0.0, 2: 0.0, 3: 0.0}, {1: 0, 2: 0, 3: 0}
    watch = ServerWatch(cpu.__getitem__, size.__getitem__, lambda: 3_000_000)
    pids = {Task("ps", i): i + 1 for i in range(3)}
    hot, ends = [], []
    for second in range(20):
        for pid, per_second in ((1, 0.8), (2, 0.1), (3, 0.1)):
            cpu[pid], size[pid] = per_second * second, 1000 * second
        watch.look(pids, float(second))
        hot.append(watch.hotspot())
        ends.append(watch.memory_ends())

    (found,) = filter(None, hot)
    assert found[0] == Task("ps", 0)
    assert found[1] == pytest.approx(0.8)
    (end,) = filter(None, ends)
    assert end.bytes_per_sec == pytest.approx(3000)
    assert end.secs == pytest.approx(1000)


def test_servers_that_share_the_work_and_do_not_grow_are_not_named() -> None:
    cpu = {1: 0.0, 2: 0.0}
    watch = ServerWatch(cpu.__getitem__, lambda _: 5000, lambda: 3_000_000)
    for second in range(20):
        cpu[1], cpu[2] = 0.5 * second, 0.4 * second
        watch.look({Task("ps", 0): 1, Task("ps", 1): 2}, float(second))
        assert watch.hotspot() is None
        assert watch.memory_ends() is None
