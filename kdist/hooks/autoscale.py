"""`Autoscale`: as many workers as are worth it, and servers that are named before they fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from kdist.cluster.processes import usage
from kdist.cluster.scaler import Scaler, scaler_of
from kdist.cluster.spec import ClusterShape, Task
from kdist.config.checks import check_more_than_zero, check_one_of, check_whole_number
from kdist.errors import ClusterError, ConfigError
from kdist.hooks.base import Hook, RunContext, RunValues, Session
from kdist.log import warn
from kdist.run.resizes import Resize

#: The share of a worker's rate that another one has to bring, and below which one is taken away.
_WORTH_ADDING, _NOT_WORTH_KEEPING = 0.5, 0.1
#: How many times the mean share of the servers' CPU time makes a hotspot.
_HOT = 1.5
#: A server is named whose memory would end within so many seconds, by its slope over so many looks.
_AHEAD_SECS, _LOOKS = 3600.0, 10


class Autoscale(Hook):
    """Adds workers as long as each brings at least half of a worker's rate, and takes one away that brings less than a
    tenth.

    It measures the rate of examples for `every_secs`, in which nothing is prepared, before and after each change. When
    more workers are not worth it, the number stays; so it does after a task has left that was told to.

    Of servers on this machine it names a hotspot, whose share of the servers' CPU time is 1.5 times the mean. It warns
    if the servers, as they grow, use up the memory of the machine within an hour.

    Args:
        min_workers, max_workers: the limits.
        every_secs: seconds between two decisions.
        ps: `auto` also adds a server when memory ends; `keep` leaves their number.
        clock: returns seconds; replaced in tests.

    Raises:
        ConfigError: a value is not allowed.
    """

    def __init__(
        self,
        min_workers: int = 1,
        max_workers: int = 8,
        every_secs: float = 20.0,
        ps: str = "keep",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_whole_number("hooks.autoscale.min_workers", min_workers, required=True)
        check_whole_number("hooks.autoscale.max_workers", max_workers, required=True)
        check_more_than_zero("hooks.autoscale.every_secs", every_secs)
        check_one_of("hooks.autoscale.ps", ps, ("keep", "auto"))
        if max_workers < min_workers:
            raise ConfigError(f"hooks.autoscale.max_workers={max_workers}: is less than min_workers={min_workers}")
        self._min, self._max, self._every_secs, self._ps = min_workers, max_workers, every_secs, ps
        self._clock = clock

    def begin(self, session: Session) -> None:
        self._servers = ServerWatch()
        #: The measured rate of each number of workers, in examples per second.
        self._rates: dict[int, float] = {}
        self._has_settled = False
        #: Until when a change that was asked for may still come.
        self._waits_until = -math.inf
        self._begin_to_measure()

    def after_create_session(self, session: Session) -> None:
        starts_tasks = session.strategy.meeting_place is None
        self._scaler: Scaler = scaler_of(
            session.cluster.scaler, session.resize, session.print_line, starts_tasks=starts_tasks
        )
        self._begin_to_measure()

    def after_resize(self, session: Session, resize: Resize) -> None:
        if resize.change.startswith("leave="):
            # Somebody wants it back.
            self._has_settled = True
        self._waits_until = -math.inf
        self._begin_to_measure()

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if not values.warming_up:
            self._examples += values.num_examples
            self._secs += values.seconds
        if self._clock() - self._since < self._every_secs:
            return
        session = context.session
        self._watch_servers(session)
        if self._secs >= self._every_secs / 2 and not self._is_waiting:
            self._decide(session, self._examples / self._secs)
        self._begin_to_measure()

    @property
    def _is_waiting(self) -> bool:
        return self._clock() < self._waits_until

    def _begin_to_measure(self) -> None:
        self._since, self._examples, self._secs = self._clock(), 0, 0.0

    def _decide(self, session: Session, rate: float) -> None:
        number = session.strategy.num_workers
        self._rates[number] = rate
        if number < self._min:
            self._scale(session, self._min, f"at least {self._min} workers (hooks.autoscale.min_workers)")
            return
        if self._has_settled:
            return
        before = self._rates.get(number - 1)
        if before is not None:
            brings = (rate - before) / (before / (number - 1))
            if brings < _WORTH_ADDING:
                self._has_settled = True
                if brings < _NOT_WORTH_KEEPING and number > self._min:
                    self._scale(session, number - 1, f"worker {number} brings {brings:.0%} of a worker's rate")
                return
        if number < self._max:
            known = f"{rate:.0f} examples/s with {number}"
            self._scale(session, number + 1, f"{known}; another one may bring half of a worker's rate")
        else:
            self._has_settled = True

    def _scale(self, session: Session, workers: int, why: str, ps: int | None = None) -> None:
        plan = session.strategy.plan
        num_ps = ps if ps is not None else 0 if plan is None else plan.num_servers
        # What is not there by then does not come: another number is asked for only if the rate says so again.
        self._waits_until = self._clock() + session.cluster.start_timeout
        try:
            self._scaler.scale(ClusterShape(num_ps, workers), f"autoscale: {why}")
        except ClusterError as error:
            warn(str(error))
            self._has_settled = True

    def _watch_servers(self, session: Session) -> None:
        servers = {task: pid for task, pid in session.strategy.pids.items() if task.job == "ps"}
        self._servers.look(servers, self._clock())
        if (hot := self._servers.hotspot()) is not None:
            task, share = hot
            warn(
                f"{task} is a hotspot: it has {share:.0%} of the CPU time of the servers; more servers, or "
                "strategy.placement=partitioned, spread what it holds"
            )
        if (ends := self._servers.memory_ends()) is not None:
            rate, minutes = f"{ends.bytes_per_sec / 1e6:.1f} MB/s", f"{ends.secs / 60:.0f} minutes"
            warn(f"the servers grow by {rate}: the memory of this machine ends in {minutes}")
            if self._ps == "auto" and not self._is_waiting:
                workers = session.strategy.num_workers
                self._scale(session, workers, "memory of the servers ends within an hour", ps=len(servers) + 1)


class MemoryEnd(NamedTuple):
    """The end of memory, in seconds from now, and how fast it is used up."""

    secs: float
    bytes_per_sec: float


class ServerWatch:
    """CPU time and memory of the servers on this machine, over the last looks.

    Args:
        cpu_secs, memory: of a process, by its id; replaced in tests.
        left: returns the bytes that are left on this machine; replaced in tests.
    """

    def __init__(
        self,
        cpu_secs: Callable[[int], float | None] = usage.cpu_secs,
        memory: Callable[[int], int | None] = usage.resident_bytes,
        left: Callable[[], int | None] = usage.memory_left,
    ) -> None:
        self._cpu_secs, self._memory, self._left = cpu_secs, memory, left
        self._cpu: list[dict[Task, float]] = []
        self._sizes: list[tuple[float, int]] = []
        self._named: set[object] = set()

    def look(self, pids: dict[Task, int], now: float) -> None:
        """Looks at the processes of servers, by task."""
        cpu = {task: secs for task, pid in pids.items() if (secs := self._cpu_secs(pid)) is not None}
        if self._cpu and self._cpu[-1].keys() != cpu.keys():
            self._cpu, self._sizes = [], []
        self._cpu = [*self._cpu, cpu][-_LOOKS:]
        sizes = [self._memory(pid) for pid in pids.values()]
        if None not in sizes and sizes:
            self._sizes = [*self._sizes, (now, sum(size or 0 for size in sizes))][-_LOOKS:]

    def hotspot(self) -> tuple[Task, float] | None:
        """A server that was not named yet, with its share of the CPU time of all, if that is 1.5 times the mean."""
        if len(self._cpu) < 2 or len(self._cpu[-1]) < 2:
            return None
        used = {task: secs - self._cpu[0][task] for task, secs in self._cpu[-1].items()}
        total = sum(used.values())
        task = max(used, key=lambda each: used[each])
        # Idle servers say nothing.
        if total < 1.0 or used[task] * len(used) <= _HOT * total or task in self._named:
            return None
        self._named.add(task)
        return task, used[task] / total

    def memory_ends(self) -> MemoryEnd | None:
        """The end of memory, if that is within an hour, by the slope of the last looks; told once."""
        left = self._left()
        if len(self._sizes) < _LOOKS or left is None or "memory" in self._named:
            return None
        (began, first), (ended, last) = self._sizes[0], self._sizes[-1]
        per_sec = (last - first) / max(1e-9, ended - began)
        if per_sec <= 0 or left / per_sec > _AHEAD_SECS:
            return None
        self._named.add("memory")
        return MemoryEnd(left / per_sec, per_sec)
