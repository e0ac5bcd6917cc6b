import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fakes import CountingStrategy, FakeCheckpoints, FakeClock, FakeTotals, Recorder, make_session, run_all

from kdist.errors import CheckpointError, ConfigError, NonFiniteError
from kdist.hooks import CheckpointSaver, Hook, LoggingTensor, NanTensor, StepCounter, StopAtStep, SummarySaver
from kdist.hooks.base import RunContext, RunValues
from kdist.session import RunLength
from kdist.strategies.call_logs import StepLogs


def test_hooks_are_called_in_the_order_of_the_contract() -> None:
    recorder = Recorder()
    run_all(make_session([recorder, StopAtStep(last_step=1)]))
    assert recorder.events == ["begin", "after_create_session", "before_run", "after_run", "end", "close"]


@pytest.mark.parametrize("event", ["begin", "after_create_session", "before_run", "after_run", "end"])
def test_what_a_hook_raises_ends_the_session_and_closes_every_hook(event: str) -> None:
    raising, other = Recorder(raise_in=event), Recorder()
    session = make_session([raising, other, StopAtStep(last_step=1)])
    with pytest.raises(RuntimeError, match=event):
        run_all(session)
    assert raising.events[-1] == other.events[-1] == "close"
    assert "end" not in other.events
    assert session.strategy.stopped == 1
    assert session.summaries.closed


def test_a_failing_step_skips_end_and_closes() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="the step failed"):
        run_all(make_session([recorder, StopAtStep(last_step=10)], CountingStrategy(fail_at=3)))
    assert "end" not in recorder.events
    assert recorder.events[-1] == "close"


@pytest.mark.parametrize("last_step", [1, 7, 100, 1000])
def test_stops_exactly(last_step: int) -> None:
    session = run_all(make_session([StopAtStep(last_step=last_step), CheckpointSaver(every_steps=64)]))
    assert session.global_step == last_step
    assert session.stopped_by == "StopAtStep"


def test_never_steps_over_a_boundary_of_a_hook() -> None:
    session = run_all(
        make_session([CheckpointSaver(every_steps=25), SummarySaver(every_steps=10), StopAtStep(last_step=60)])
    )
    assert session.checkpoints.saved == [0, 25, 50, 60]
    train = [step for split, step, tags in session.summaries.written if "loss" in tags]
    assert train == [1, 11, 21, 31, 41, 51, 60]


def test_stop_after_num_steps_counts_from_the_resumed_step() -> None:
    session = run_all(make_session([StopAtStep(num_steps=5)], checkpoints=FakeCheckpoints(restorable=300)))
    assert session.first_step == 300
    assert session.global_step == 305


def test_stop_at_the_step_that_fit_was_told() -> None:
    assert run_all(make_session([StopAtStep()], last_step=12)).global_step == 12


def test_resume_at_or_past_the_last_step_runs_nothing() -> None:
    session = run_all(make_session([StopAtStep(last_step=300)], checkpoints=FakeCheckpoints(restorable=300)))
    assert session.strategy.runs == []
    assert session.stopped_by == "StopAtStep"


def test_resume_modes() -> None:
    never = run_all(
        make_session([StopAtStep(last_step=2)], checkpoints=FakeCheckpoints(restorable=300), resume="never")
    )
    assert never.first_step == 0
    assert never.checkpoints.was_set_aside
    with pytest.raises(CheckpointError, match="must"):
        run_all(make_session([StopAtStep(last_step=2)], resume="must"))
    with pytest.raises(ConfigError, match=r"run\.resume=maybe.*auto, never, must"):
        make_session([], resume="maybe")


def test_saves_at_start_every_so_many_seconds_and_at_the_end() -> None:
    clock = FakeClock()
    strategy = CountingStrategy(clock, secs_per_step=1.0)
    saver = CheckpointSaver(every_secs=10, clock=clock)
    session = run_all(make_session([saver, StopAtStep(last_step=100)], strategy, clock=clock))
    assert session.checkpoints.saved[0] == 0
    assert session.checkpoints.saved[-1] == 100
    gaps = [b - a for a, b in zip(session.checkpoints.saved, session.checkpoints.saved[1:])]
    assert all(gap <= 16 for gap in gaps)
    assert len(gaps) > 4


def test_does_not_save_a_step_twice() -> None:
    session = run_all(make_session([CheckpointSaver(every_steps=10), StopAtStep(last_step=20)]))
    assert session.checkpoints.saved == [0, 10, 20]
    resumed = run_all(
        make_session(
            [CheckpointSaver(every_steps=10), StopAtStep(last_step=20)], checkpoints=FakeCheckpoints(restorable=20)
        )
    )
    assert resumed.checkpoints.saved == []


class Chained(FakeCheckpoints):
    """Notes the names of what is saved."""

    def __init__(self, *failing: int) -> None:
        super().__init__()
        self.names: list[str] = []
        self._failing = list(failing)

    def write(self, step: int, stored: Any, *, keep: int, since: Any = None) -> Path:
        if step in self._failing:
            raise CheckpointError(f"step {step} could not be saved")
        path = super().write(step, stored, keep=keep, since=since)
        self.names.append(path.name if since is None else f"{path.name} after {since.step}")
        return path


class GotDeltas(Hook):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def after_delta(self, path: Path) -> None:
        self.paths.append(path.name)


@pytest.mark.parametrize("background", [False, True])
def test_between_full_checkpoints_there_are_deltas_and_the_last_one_is_full(background: bool) -> None:
    got = GotDeltas()
    saver = CheckpointSaver(every_steps=10, full_every=3, background=background)
    session = run_all(make_session([saver, got, StopAtStep(last_step=50)], checkpoints=Chained()))
    assert session.checkpoints.names == [
        "ckpt-0",
        "delta-10 after 0",
        "delta-20 after 10",
        "ckpt-30",
        "delta-40 after 30",
        "delta-50 after 40",
        "ckpt-50",
    ]
    assert got.paths == ["delta-10", "delta-20", "delta-40", "delta-50"]
    # Servers keep what the next delta needs, and no more.
    assert session.strategy.intervals == [None, 1, 2, None, 4, 5, None]


def test_the_first_checkpoint_of_a_resumed_run_is_full() -> None:
    hooks: list[Hook] = [CheckpointSaver(every_steps=10, full_every=9), StopAtStep(last_step=40)]
    checkpoints = Chained()
    checkpoints.restorable = 20
    run_all(make_session(hooks, checkpoints=checkpoints))
    assert checkpoints.names == ["ckpt-30", "delta-40 after 30", "ckpt-40"]


def test_a_delta_that_fails_is_caught_up_and_a_full_one_that_fails_is_repeated() -> None:
    hooks: list[Hook] = [CheckpointSaver(every_steps=10, full_every=3), StopAtStep(last_step=70)]
    with pytest.warns(UserWarning, match="could not be saved"):
        session = run_all(make_session(hooks, checkpoints=Chained(10, 40)))
    assert session.checkpoints.names == [
        "ckpt-0",
        "delta-20 after 0",
        "delta-30 after 20",
        "ckpt-50",
        "delta-60 after 50",
        "delta-70 after 60",
        "ckpt-70",
    ]


@pytest.mark.parametrize(("name", "follows"), [("parameters/table", "ckpt-30"), ("learning_rate", "delta-30 after 20")])
def test_after_rows_of_tables_were_set_the_next_checkpoint_is_full(name: str, follows: str) -> None:
    class Writes(Hook):
        def after_run(self, context: RunContext, values: RunValues) -> None:
            if values.global_step == 25:
                context.session.write({name: 0.5})

        def due_in(self, step: int) -> int:
            return 25 - step % 25

    hooks: list[Hook] = [Writes(), CheckpointSaver(every_steps=10, full_every=9), StopAtStep(last_step=30)]
    strategy = CountingStrategy()
    strategy.check = lambda values: None  # type: ignore[method-assign]
    session = run_all(make_session(hooks, strategy, checkpoints=Chained()))
    assert session.checkpoints.names[3] == follows


def test_a_checkpoint_that_the_user_saves_is_full_and_what_a_signal_leaves_may_be_a_delta() -> None:
    class Saves(Hook):
        def after_run(self, context: RunContext, values: RunValues) -> None:
            if values.global_step == 15:
                context.session.save(keep=5)
            if values.global_step == 25:
                context.session.interrupt("SIGTERM")  # type: ignore[attr-defined]

        def due_in(self, step: int) -> int:
            return 5 - step % 5

    hooks: list[Hook] = [Saves(), CheckpointSaver(every_steps=10, full_every=9), StopAtStep(last_step=99)]
    session = run_all(make_session(hooks, checkpoints=Chained()))
    assert session.checkpoints.names == [
        "ckpt-0",
        "delta-10 after 0",
        "ckpt-15",
        "delta-20 after 15",
        "delta-25 after 20",
    ]


class FullDisk(FakeCheckpoints):
    """Checkpoints that cannot save some steps."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self._steps = steps

    def write(self, step: int, values: Mapping[str, Any], *, keep: int, since: Any = None) -> Path:
        if step in self._steps:
            raise CheckpointError(f"step {step} could not be saved to D: no space\n  last good checkpoint: ckpt-1")
        return super().write(step, values, keep=keep)


def test_a_failed_save_is_one_warning_and_the_next_is_tried_when_it_is_due() -> None:
    hooks: list[Hook] = [CheckpointSaver(every_steps=10), StopAtStep(last_step=40)]
    with pytest.warns(UserWarning, match="training continues") as warned:
        session = run_all(make_session(hooks, checkpoints=FullDisk(0, 20)))
    assert session.checkpoints.saved == [10, 30, 40]
    assert [str(warning.message) for warning in warned] == [
        f"kdist: step {step} could not be saved to D: no space; last good checkpoint: ckpt-1; training continues"
        for step in (0, 20)
    ]


def test_after_a_failed_save_the_clock_starts_anew() -> None:
    clock = FakeClock()
    saver = CheckpointSaver(every_secs=50, clock=clock)
    strategy = CountingStrategy(clock, secs_per_step=1.0)
    hooks: list[Hook] = [saver, StopAtStep(last_step=100)]
    with pytest.warns(UserWarning, match="could not be saved") as warned:
        run_all(make_session(hooks, strategy, clock=clock, checkpoints=FullDisk(*range(1, 100))))
    assert len(warned) == 1


def test_a_failed_last_save_is_an_error() -> None:
    recorder = Recorder()
    hooks: list[Hook] = [recorder, StopAtStep(last_step=20), CheckpointSaver(every_steps=10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="step 20 could not be saved"):
            run_all(make_session(hooks, checkpoints=FullDisk(20)))
    assert recorder.events[-1] == "close"


def test_nan_ends_the_run_before_it_is_saved() -> None:
    strategy = CountingStrategy()
    strategy.nan_at = 15
    session = make_session([NanTensor(), StopAtStep(last_step=50), CheckpointSaver(every_steps=10)], strategy)
    with pytest.raises(NonFiniteError, match=r"(?s)NanTensor: the loss became nan.*ckpt-10"):
        run_all(session)
    assert session.checkpoints.saved == [0, 10]


def test_nan_may_stop_cleanly_instead() -> None:
    strategy = CountingStrategy()
    strategy.nan_at = 3
    assert run_all(make_session([NanTensor(fail_on_nan_loss=False)], strategy)).stopped_by == "NanTensor"


def test_console_line_has_interval_loss_rate_and_time_left() -> None:
    lines: list[str] = []
    clock = FakeClock()
    strategy = CountingStrategy(clock, secs_per_step=0.01)
    hook = LoggingTensor(every_steps=100, clock=clock)
    run_all(make_session([hook, StopAtStep()], strategy, last_step=300, clock=clock, print_line=lines.append))
    assert lines == [
        "train | step    100/300 | loss 50.5000 | over 100 steps |  100.0 steps/s | ETA 2s",
        "train | step    200/300 | loss 150.5000 | over 100 steps |  100.0 steps/s | ETA 1s",
        "train | step    300/300 | loss 250.5000 | over 100 steps |  100.0 steps/s | ETA 0s",
    ]


def test_step_counter_writes_rates() -> None:
    clock = FakeClock()
    strategy = CountingStrategy(clock, secs_per_step=0.01)
    session = run_all(make_session([StepCounter(clock=clock), StopAtStep(last_step=200)], strategy, clock=clock))
    assert session.summaries.written == [
        ("train", 100, ("perf/steps_per_sec", "perf/examples_per_sec")),
        ("train", 200, ("perf/steps_per_sec", "perf/examples_per_sec")),
    ]
    assert session.statistics.steps_per_second == pytest.approx(100.0)


def test_tensorboard_shows_loss_and_metrics_first() -> None:
    """It sorts tags by name, and opens the first ones."""
    session = run_all(make_session([SummarySaver(), StepCounter(), StopAtStep(last_step=200)]))
    tags = {tag for split, _, written in session.summaries.written if split == "train" for tag in written}
    assert {"loss", "updates/learning_rate", "perf/steps_per_sec"} <= tags
    assert min(tags) == "loss"


def test_an_interrupt_ends_before_the_next_run_and_cleanly() -> None:
    recorder = Recorder()
    session = make_session([recorder, CheckpointSaver()])
    with session:
        session.run()
        session.interrupt("SIGINT")
        assert session.should_stop()
        assert session.run() is None
    assert session.stopped_by == "SIGINT"
    assert recorder.events[-2:] == ["end", "close"]
    assert session.checkpoints.saved[-1] == session.global_step


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_steps_of_a_repeated_call_are_counted_as_extra(is_asynchronous: bool) -> None:
    strategy = CountingStrategy()
    strategy.lost_call_steps = 3
    # A synchronous update is never repeated: what is missing there was done once, and nobody told of it.
    strategy.is_asynchronous = is_asynchronous  # type: ignore[misc]
    session = run_all(make_session([StopAtStep(last_step=10)], strategy))
    assert session.global_step >= 10
    assert session.statistics.extra_steps == (3 if is_asynchronous else 0)
    assert session.statistics.applied == session.global_step


def test_hooks_by_the_clock_are_called_about_every_second() -> None:
    clock = FakeClock()
    strategy = CountingStrategy(clock, secs_per_step=0.1)
    run_all(make_session([StopAtStep(last_step=100)], strategy, clock=clock))
    assert max(strategy.runs[1:]) <= 10


class OfCalls(CountingStrategy):
    """Calls of 64 steps take a second; hooks stop in the middle of them."""

    steps_ahead = 0

    def run(self, num_steps: int, interrupted: Any, may_begin: int | None = None) -> Any:
        while self.steps_ahead < num_steps:
            self._clock.now += 1.0
            self.steps_ahead += 64
        self.steps_ahead -= num_steps
        return super().run(num_steps, interrupted, may_begin)

    @property
    def is_idle(self) -> bool:
        return not self.steps_ahead


class KeepsRates(Hook):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.seconds = 0.0

    def after_run(self, context: Any, values: RunValues) -> None:
        self.rates.append(values.num_steps / values.seconds)
        self.seconds += values.seconds


def test_every_run_has_the_rate_of_the_calls_also_if_they_do_not_end_with_it() -> None:
    clock, kept = FakeClock(), KeepsRates()
    began = clock.now
    hooks = [kept, LoggingTensor(every_steps=50), StopAtStep(last_step=3200)]
    run_all(make_session(hooks, OfCalls(clock), clock=clock))
    assert kept.rates == pytest.approx([64.0] * len(kept.rates))
    assert kept.seconds == pytest.approx(clock.now - began) == 50.0


def run_of(num_steps: int, secs: float) -> RunValues:
    logs = StepLogs(np.full(num_steps, 8), np.zeros(num_steps, np.int64), FakeTotals((0.0,)))
    return RunValues(0, num_steps, secs, warming_up=False, steps=logs)


def test_a_run_is_about_a_second_also_if_steps_end_together() -> None:
    """As those of hundreds of workers that began together do: a run of one step may take as long as one of many."""
    length = RunLength()
    for _ in range(10):
        for num_steps, secs in ((199, 0.01), (1, 1.99)):
            length.observe(run_of(num_steps, secs))
    # They make 100 a second.
    assert 50 <= length.fewest([]) <= 200


def test_runs_keep_their_length_after_the_machine_was_suspended() -> None:
    length = RunLength()
    for _ in range(50):
        length.observe(run_of(50, 0.2))
    length.observe(run_of(50, 3600.0))
    assert length.fewest([]) >= 50


def test_runs_become_shorter_when_steps_become_slower_for_good() -> None:
    length = RunLength()
    for _ in range(50):
        length.observe(run_of(50, 0.2))
    for _ in range(6):
        num_steps = length.fewest([])
        length.observe(run_of(num_steps, 0.5 * num_steps))
    assert length.fewest([]) <= 4


def test_as_many_steps_may_begin_as_all_workers_need() -> None:
    class OfManyWorkers(CountingStrategy):
        steps_in_flight = 512

        def run(self, num_steps: int, interrupted: Any, may_begin: int | None = None) -> Any:
            begun.append((self.step, may_begin))
            return super().run(num_steps, interrupted, may_begin)

    clock = FakeClock()
    begun: list[tuple[int, int | None]] = []
    # Far fewer of their steps end in a second.
    hooks = [LoggingTensor(every_steps=10), CheckpointSaver(every_steps=1000), StopAtStep(last_step=2000)]
    run_all(make_session(hooks, OfManyWorkers(clock, secs_per_step=0.5), clock=clock))
    assert all(may_begin == 1000 - step % 1000 or (may_begin or 0) >= 512 for step, may_begin in begun)
    assert max(may_begin or 0 for _, may_begin in begun) < 600


@pytest.mark.parametrize(
    "make",
    [
        lambda: StopAtStep(num_steps=1, last_step=2),
        lambda: StopAtStep(last_step=0),
        lambda: CheckpointSaver(keep=0),
        lambda: CheckpointSaver(every_secs=0),
        lambda: SummarySaver(every_steps=0),
        lambda: LoggingTensor(every_steps=-1),
    ],
)
def test_hooks_refuse_values_out_of_range(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("make", [StopAtStep, CheckpointSaver, SummarySaver, StepCounter, NanTensor, LoggingTensor])
def test_every_hook_can_serve_two_sessions_and_be_closed_twice(make: Any) -> None:
    hook = make()
    for _ in range(2):
        run_all(make_session([hook, StopAtStep(last_step=3)], last_step=3))
        hook.close()


class WritesNumbers(Hook):
    """Makes numbers tensors, as summaries do; notes the memory after some runs."""

    def __init__(self) -> None:
        self.kilobytes: list[int] = []

    def due_in(self, step: int) -> int:
        return 1

    def after_run(self, context: RunContext, values: RunValues) -> None:
        for i in range(100):
            tf.constant(values.global_step * 1000 + i)
        if values.global_step % 250 == 0:
            rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
            self.kilobytes.append(next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_numbers_that_become_tensors_are_not_kept() -> None:
    hook = WritesNumbers()
    run_all(make_session([hook, StopAtStep(last_step=500)]))
    # 25,000 of them would be 18 MB.
    assert hook.kilobytes[1] - hook.kilobytes[0] < 6_000
