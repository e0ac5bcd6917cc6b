"""Fakes that tests share: a strategy that only counts, checkpoints, summaries, a clock, and a session made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.hooks import Hook
from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.parameters.values.named_values import NamedValues
from kdist.parameters.values.value_files import ValueFiles
from kdist.run.checkpoint import Checkpoints
from kdist.session import TrainSession
from kdist.storage.lock import LockOwner
from kdist.strategies.base import Strategy, Values
from kdist.strategies.call_logs import StepLogs
from kdist.threads import in_thread


@dataclass(frozen=True)
class FakeTotals:
    """Metrics of steps, and their totals, whose loss is the mean of the steps' losses."""

    losses: tuple[float, ...]

    def __add__(self, other: FakeTotals) -> FakeTotals:
        return FakeTotals(self.losses + other.losses)

    def __getitem__(self, steps: slice) -> FakeTotals:
        return FakeTotals(self.losses[steps])

    def total(self) -> FakeTotals:
        return self

    @property
    def logs(self) -> dict[str, float]:
        return {"loss": self.loss}

    @property
    def loss(self) -> float:
        return float(np.mean(self.losses))


def begun(write: Callable[[], None], *, aside: bool) -> Future[None]:
    """Calls a function in a thread, or at once."""
    if aside:
        return in_thread(write)
    write()
    written: Future[None] = Future()
    written.set_result(None)
    return written


class ValuesHere:
    """Values in this process that are saved and restored as those of a strategy are."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self.values = dict(values)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in self.values.items() if name != "seed"}

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        first, *others = self.values
        files = ValueFiles(self._in_variables(others))
        return begun(files.begin_save(prefix, {first: self.values[first]}, copies=aside), aside=aside)

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        values = self._in_variables(self.shapes)
        ValueFiles(values).restore(path)
        self.values = values.read()

    def _in_variables(self, names: Iterable[str]) -> NamedValues:
        return NamedValues({name: [StoredShard.whole(tf.Variable(self.values[name]))] for name in names}, {})


class CountingStrategy(Strategy, Values):
    """Each step takes `secs_per_step` on a fake clock and has its own number as loss. It is its own values."""

    name = "counting"

    def __init__(self, clock: Any = None, secs_per_step: float = 0.0, fail_at: int | None = None) -> None:
        self.step = 0
        self.runs: list[int] = []
        self.stopped = 0
        self.lost_call_steps = 0
        self.nan_at: int | None = None
        self.written: dict[str, np.ndarray] = {}
        self.employed: list[int] = []
        self.intervals: list[int | None] = []
        self._clock, self._secs, self._fail_at = clock, secs_per_step, fail_at

    def start(self, spec: Any) -> None:
        self.spec = spec

    def run(self, num_steps: int, interrupted: Callable[[], bool], may_begin: int | None = None) -> StepLogs | None:
        if interrupted():
            return None
        self.runs.append(num_steps)
        losses = [
            float("nan") if self.step + i + 1 == self.nan_at else float(self.step + i + 1) for i in range(num_steps)
        ]
        if self._fail_at is not None and self.step + num_steps >= self._fail_at:
            raise RuntimeError("the step failed")
        self.step += num_steps + self.lost_call_steps
        self.lost_call_steps = 0
        if self._clock is not None:
            self._clock.now += num_steps * self._secs
        return StepLogs(np.full(num_steps, 8), np.zeros(num_steps, np.int64), FakeTotals(tuple(losses)))

    def drain(self) -> None:
        pass

    @property
    def values(self) -> CountingStrategy:
        return self

    def global_step(self) -> int:
        return self.step

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"global_step": ()}

    @property
    def by_rows(self) -> frozenset[str]:
        return frozenset({"parameters/table"})

    def portions(self, names: Collection[str] | None = None) -> Iterator[Mapping[str, np.ndarray]]:
        yield {"global_step": np.array(self.step)}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        self.step = int(values.get("global_step", self.step))
        self.written = dict(values)

    def histograms(self) -> dict[str, np.ndarray]:
        return {}

    def next_interval(self, since: int | None) -> int | None:
        self.intervals.append(since)
        return len(self.intervals)

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        if aside:
            return in_thread(lambda: None)
        return ValuesHere({**self.read(), "seed": np.array(self.spec.seed)}).begin_save(prefix, aside=False)

    def restore(self, path: Path, deltas: Sequence[Path] = ()) -> None:
        self.step = int(path.name.rpartition("-")[2])

    def count_rows(self) -> None:
        pass

    def use_averages(self) -> None:
        pass

    def set_active(self, workers: Collection[int]) -> None:
        self.employed = list(workers)

    def stop(self) -> None:
        self.stopped += 1


@dataclass
class FakeCheckpoints:
    saved: list[int] = field(default_factory=list)
    restorable: int | None = None
    was_set_aside: bool = False
    folder: Path = Path("checkpoints")

    @property
    def place(self) -> str:
        return str(self.folder)

    def beside(self, name: str) -> Checkpoints:
        return Checkpoints(self.folder.with_name(name))

    def write(self, step: int, stored: Any, *, keep: int, since: DeltaBase | None = None) -> Path:
        self.saved.append(step)
        return self.folder / f"{'ckpt' if since is None else 'delta'}-{step}"

    def begin_save(self, step: int, stored: Any, *, since: DeltaBase | None = None) -> Future[None]:
        return stored.begin_save(self.folder / f"unfinished-{step}", since)

    def finish_save(
        self, step: int, wait: Callable[[], None], *, keep: int | None = None, since: DeltaBase | None = None
    ) -> Path:
        wait()
        return self.write(step, None, keep=0, since=since)

    def restore(self, stored: Any) -> Path | None:
        if self.restorable is None or self.was_set_aside:
            return None
        path = self.folder / f"ckpt-{self.restorable}"
        stored.restore(path)
        return path

    def steps(self) -> list[int]:
        return sorted(self.saved)

    def newest(self) -> Path | None:
        return self.folder / f"ckpt-{self.saved[-1]}" if self.saved else None

    def set_aside(self, after: int | None = None) -> None:
        self.was_set_aside |= after is None

    def tidy(self) -> None:
        pass


@dataclass
class FakeSummaries:
    written: list[tuple[str, int, tuple[str, ...]]] = field(default_factory=list)
    closed: bool = False
    restarts: list[int] = field(default_factory=list)

    def restart(self, step: int) -> None:
        self.restarts.append(step)

    def scalars(self, split: str, values: Mapping[str, float], step: int) -> None:
        self.written.append((split, step, tuple(values)))

    def histogram(self, split: str, tag: str, values: np.ndarray, step: int) -> None:
        self.written.append((split, step, (tag,)))

    def buckets(self, split: str, tag: str, buckets: np.ndarray, step: int) -> None:
        self.written.append((split, step, (tag,)))

    def text(self, split: str, tag: str, text: str, step: int) -> None:
        self.written.append((split, step, (tag,)))

    def close(self) -> None:
        self.closed = True


class FakeSpec:
    def __init__(self) -> None:
        self.model = SimpleNamespace(stop_evaluating=False)
        self.seed = 7
        self._learning_rate = 0.1

    def learning_rate(self, step: int) -> float:
        return self._learning_rate

    def set_learning_rate(self, value: float) -> None:
        self._learning_rate = value


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(Hook):
    """Writes down every event."""

    def __init__(self, raise_in: str | None = None) -> None:
        self.events: list[str] = []
        self._raise_in = raise_in

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event == self._raise_in:
            raise RuntimeError(f"in {event}")

    def begin(self, session: Any) -> None:
        self._note("begin")

    def after_create_session(self, session: Any) -> None:
        self._note("after_create_session")

    def before_run(self, context: Any) -> None:
        self._note("before_run")

    def after_run(self, context: Any, values: Any) -> None:
        self._note("after_run")

    def end(self, session: Any) -> None:
        self._note("end")

    def close(self) -> None:
        self._note("close")


def make_session(hooks: list[Hook], strategy: CountingStrategy | None = None, **options: Any) -> TrainSession:
    options = {
        "checkpoints": FakeCheckpoints(),
        "summaries": FakeSummaries(),
        "print_line": lambda line: None,
        "max_restarts": 0,
        **options,
    }
    made = strategy or CountingStrategy()
    return TrainSession(lambda: made, FakeSpec(), hooks, **options)  # type: ignore[arg-type]


def run_all(session: TrainSession) -> TrainSession:
    with session:
        while not session.should_stop():
            session.run()
    return session


#: This process, as the owner of a lock.
ME = LockOwner.this_process()


def write_lock(run_dir: Path, content: str) -> None:
    run_dir.mkdir()
    (run_dir / ".lock").write_text(content)


def held_by(**other: object) -> str:
    return json.dumps({**vars(ME), **other})


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid
