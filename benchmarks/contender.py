"""A contender while it races: its processes, stopped but for its turns, and what is read off them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.isolated import bytes_received, prefix
from benchmarks.peers.task import Task
from benchmarks.progress import PREPARED, Progress

_START_SECS = 120.0
# Until calls have their length; on a slow machine a large model takes a minute.
_PREPARE_SECS = 180.0
_WARM_UP_SECS = 0.5
# After a rest a contender is slower, some for seconds: caches are cold, and the kernel may have taken pages of the
# program. It has settled when the last two windows of so many seconds are hardly faster than the fastest before.
_SETTLE_WINDOW_SECS = 0.4
_SETTLE_SECS = 4.0
_HARDLY_FASTER = 1.05
# Of a window: where a call has many steps, news of its end may be late, and that of one or two calls would not say how
# long they take.
_FEWEST_NEWS = 8
_FEWEST_NEWS_TO_SETTLE = 3
# Of each of two ways to spread tasks over cores.
_TRIAL_SECS = 0.6


@dataclass(frozen=True)
class Entry:
    """A contender in a race.

    Attributes:
        name: in tables.
        module: its program, in `benchmarks.peers`.
        task: what it trains, and on how many tasks.
        can_rest: whether its processes can be stopped for a minute without taking each other for dead.
    """

    name: str
    module: str
    task: Task
    can_rest: bool = True

    @property
    def key(self) -> str:
        """Its name in results."""
        task = self.task
        return "/".join([task.workload, task.optimizer, "sync" if task.sync else "async", self.name])

    @property
    def is_kdist(self) -> bool:
        """Whether it chooses the length of its calls while it trains, and says when it has."""
        return self.module == "kdist_trainer"

    @property
    def has_tasks(self) -> bool:
        """Whether it is a peer with several processes, which can be spread over the cores in more than one way."""
        return self.module not in ("kdist_trainer", "plain_keras")


@dataclass(frozen=True)
class Turn:
    """One window of training.

    Attributes:
        steps_per_sec: global steps.
        cpu_secs_per_step: of all processes.
        bytes_per_step: on the loopback device; None where they cannot be told from others'.
    """

    steps_per_sec: float
    cpu_secs_per_step: float
    bytes_per_step: float | None


class Contender:
    """Starts an entry's processes and lets them train in turns; `stop` is due after `start`, and may be repeated."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._folder = Path(tempfile.mkdtemp(prefix="kdist-bench-"))
        (self._folder / "progress").mkdir()
        self._task = replace(entry.task, progress=str(self._folder / "progress"))
        self.start_secs = 0.0
        self.keeps_to_cores = False
        self._counters: list[Progress] = []

    def start(self) -> Contender:
        """Starts it and returns when it is warm, and paused.

        Raises:
            RuntimeError: it does not train; with the end of its log.
        """
        entry = self.entry
        command = [sys.executable, "-m", f"benchmarks.peers.{entry.module}", self._task.to_json()]
        self._isolation = prefix()
        started = time.monotonic()
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen([*self._isolation, *command], stdout=log, stderr=log, env=os.environ)
        try:
            while not self._all_count():
                if self._process.poll() is not None or time.monotonic() > started + _START_SECS:
                    raise RuntimeError(f"{entry.key} did not start:\n{self.log_tail()}")
                time.sleep(0.02)
            self.start_secs = time.monotonic() - started
            self._warm_up()
            if entry.has_tasks:
                self._choose_cores()
            self.pause()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends all its processes."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """Stops all its processes where they are."""
        if not self.entry.can_rest:
            return
        for process in self._processes():
            process.suspend()

    def take_turn(self, secs: float) -> Turn:
        """Lets it train for `secs` seconds.

        Raises:
            RuntimeError: it has ended, or one of its processes; with the end of its log.
        """
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            for process in reversed(self._processes()):
                process.resume()
            self._settle()
            turn = self._window(secs)
            self.pause()
            if self._process.poll() is None:
                return turn
        raise RuntimeError(f"{self.entry.key}, or a process of it, has ended:\n{self.log_tail()}")

    def memory_mib(self) -> dict[str, float]:
        """Memory of its processes in MiB: the largest and the sum; pages that several share count in parts."""
        sizes = [process.memory_full_info().pss / 2**20 for process in self._processes()]
        return {"largest": max(sizes), "sum": sum(sizes)}

    def said(self, what: str) -> str | None:
        """The text that it wrote beside its progress, if any."""
        path = self._folder / "progress" / what
        return path.read_text() if path.exists() else None

    def log_tail(self) -> str:
        return "\n".join((self._folder / "log").read_text(errors="replace").splitlines()[-20:])

    def _warm_up(self) -> None:
        """Waits until it prepares nothing more.

        Raises:
            RuntimeError: it has ended, or does not stop preparing.
        """
        time.sleep(_WARM_UP_SECS)
        deadline = time.monotonic() + _PREPARE_SECS
        while self.entry.is_kdist and self.said(PREPARED) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.entry.key} did not prepare its calls:\n{self.log_tail()}")
            time.sleep(0.1)

    def _settle(self) -> None:
        """Lets it train until it no longer becomes faster."""
        deadline, rates = time.monotonic() + _SETTLE_SECS, [0.0, 0.0]
        while time.monotonic() < deadline and self._process.poll() is None:
            rates.append(self._window(_SETTLE_WINDOW_SECS, _FEWEST_NEWS_TO_SETTLE).steps_per_sec)
            if max(rates[-2:]) <= _HARDLY_FASTER * max(rates[:-2]):
                break

    def _window(self, secs: float, fewest_news: int = _FEWEST_NEWS) -> Turn:
        # What is in flight is not of this window.
        steps, at = self._next_progress()
        cpu, received = self._cpu_secs(), self._bytes()
        deadline, news, last = time.monotonic() + secs, 0, (steps, at)
        while (now := self._progress())[1] < deadline or news < fewest_news:
            if time.monotonic() > deadline + 10 * secs:
                break
            news, last = news + (now != last), now
            time.sleep(0.002)
        cpu, more_received = self._cpu_secs() - cpu, self._bytes()
        done = max(1, now[0] - steps)
        return Turn(
            (now[0] - steps) / max(1e-9, now[1] - at),
            cpu / done,
            None if received is None or more_received is None else (more_received - received) / done,
        )

    def _choose_cores(self) -> None:
        """Lets each task keep to a core, as those of kdist do, if that makes this contender faster."""
        if sys.platform != "linux" or len(os.sched_getaffinity(0)) > self.entry.task.num_workers:
            return
        rates = {}
        for keep in (False, True):
            self._keep_to_cores(keep)
            rates[keep] = self._window(_TRIAL_SECS).steps_per_sec
        self.keeps_to_cores = rates[True] > rates[False]
        self._keep_to_cores(self.keeps_to_cores)

    def _keep_to_cores(self, keep: bool) -> None:
        if sys.platform != "linux":
            return
        cores = sorted(os.sched_getaffinity(0))
        for pid, task in self._task.processes.items():
            for thread in psutil.Process(pid).threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, [cores[task.index % len(cores)]] if keep else cores)

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _all_count(self) -> bool:
        self._counters = [Progress(path) for path in sorted((self._folder / "progress").glob("[!.]*-[0-9]*"))]
        is_by_worker = self.entry.module == "tf1"
        enough = len(self._counters) >= (self.entry.task.num_workers if is_by_worker else 1)
        return enough and all(counter.read()[0] for counter in self._counters)

    def _progress(self) -> tuple[int, float]:
        """Global steps, and when the last was done."""
        read = [counter.read() for counter in self._counters]
        steps = [steps for steps, _ in read]
        return (max if self.entry.task.sync else sum)(steps), max(at for _, at in read)

    def _next_progress(self) -> tuple[int, float]:
        before, deadline = self._progress(), time.monotonic() + 60
        while (now := self._progress()) == before and time.monotonic() < deadline and self._process.poll() is None:
            time.sleep(0.002)
        return now

    def _cpu_secs(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(each.user + each.system for each in times)

    def _bytes(self) -> int | None:
        return bytes_received(self._process.pid) if self._isolation else None
