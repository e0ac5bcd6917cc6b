"""The rules that every hook keeps, and the smaller hooks."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest
from fakes import CountingStrategy, FakeCheckpoints, FakeClock, make_session, run_all
from helpers import free_ports

from kdist import hooks
from kdist.errors import CheckpointError, ClusterError, ConfigError
from kdist.extras.trackers import Tracker
from kdist.hooks import (
    Autoscale,
    BestCheckpoint,
    CheckpointSaver,
    CheckpointSaverListener,
    EarlyStopping,
    Export,
    FeedFn,
    FinalOps,
    GlobalStepWaiter,
    HealthCheck,
    HistogramSaver,
    Hook,
    LoggingTensor,
    MetricsServer,
    NanTensor,
    Profiler,
    Progress,
    ProgressiveValidation,
    StepCounter,
    StopAtStep,
    SummarySaver,
)
from kdist.hooks.base import RunContext, RunValues
from kdist.parameters.tables.changed_rows import DeltaBase
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.base import Strategy

HOOKS: dict[str, Callable[[], Hook]] = {
    "BestCheckpoint": BestCheckpoint,
    "CheckpointSaver": CheckpointSaver,
    "EarlyStopping": lambda: EarlyStopping(patience=100),
    "Export": Export,
    "FeedFn": lambda: FeedFn(lambda step: {"global_step": step}),
    "FinalOps": lambda: FinalOps(lambda session: session.global_step),
    "GlobalStepWaiter": lambda: GlobalStepWaiter(10),
    "HealthCheck": lambda: HealthCheck(free_ports(1)[0]),
    # Gradients need a model.
    "HistogramSaver": lambda: HistogramSaver(every_steps=20, gradients=False),
    "LoggingTensor": LoggingTensor,
    "MetricsServer": lambda: MetricsServer(free_ports(1)[0]),
    "NanTensor": NanTensor,
    "Profiler": lambda: Profiler(every_steps=10_000),
    "Progress": Progress,
    "Autoscale": Autoscale,
    "ProgressiveValidation": lambda: ProgressiveValidation(100),
    "StepCounter": StepCounter,
    "StopAtStep": lambda: StopAtStep(last_step=40),
    "SummarySaver": SummarySaver,
}


class Validates(Hook):
    """Publishes a validation every ten steps: the given losses, then the last of them again."""

    def __init__(self, *losses: float) -> None:
        self._losses = losses

    def begin(self, session: Any) -> None:
        self._left = list(self._losses)

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step % 10 == 0:
            loss = self._left.pop(0) if len(self._left) > 1 else self._left[0]
            context.session.publish_validation({"loss": loss, "accuracy": 1 - loss})

    def due_in(self, step: int) -> int | None:
        return 10 - step % 10


class FailingOnce(CountingStrategy):
    """Fails as a cluster does at the first run that reaches step 25."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = False

    def run(self, num_steps: int, *args: Any) -> Any:
        if not self.has_failed and self.step + num_steps >= 25:
            self.has_failed = True
            raise ClusterError("ps:0 is lost")
        return super().run(num_steps, *args)


class RestorableCheckpoints(FakeCheckpoints):
    def restore(self, stored: Any) -> Any:
        self.restorable = self.saved[-1] if self.saved else None
        return super().restore(stored)


def in_folder(folder: Path, **options: Any) -> FakeCheckpoints:
    return FakeCheckpoints(folder=folder / "checkpoints", **options)


def test_every_hook_is_held_to_the_contract() -> None:
    offered = {name for name in hooks.__all__ if isinstance(getattr(hooks, name), type)}
    offered = {name for name in offered if issubclass(getattr(hooks, name), Hook)} - {"Hook"}
    # They do nothing without a fit: test_trackers.py.
    offered -= {name for name in offered if issubclass(getattr(hooks, name), Tracker)}
    assert offered == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
def test_the_contract_of_hooks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is exported is the business of another test.
    monkeypatch.setattr(Export, "end", lambda self, session: None)
    hook = HOOKS[name]()
    # All-reduce runs hooks in another process.
    copied = cloudpickle.loads(cloudpickle.dumps(hook))
    assert type(copied) is type(hook)
    # It says how far training may go, at any step; never back, and only StopAtStep may say: not at all.
    for step in (0, 1, 39, 40, 12345):
        for steps in (hook.due_in(step), hook.idle_in(step)):
            assert steps is None or steps >= 0
    for _ in range(2):
        # It serves one session after the other, and each survives a cluster that fails.
        saver = CheckpointSaver(every_steps=10)
        checkpoints = RestorableCheckpoints(folder=tmp_path / "checkpoints")
        session = make_session(
            [hook, Validates(0.5, 0.4), saver, StopAtStep(last_step=40)],
            FailingOnce(),
            checkpoints=checkpoints,
            max_restarts=1,
        )
        with pytest.warns(UserWarning, match="ps:0 is lost; restarting the cluster"):
            run_all(session)
        assert (session.global_step, session.restarts["cluster"]) == (40, 1)
        # It never lets the loop step over a boundary of another one.
        assert checkpoints.saved == [0, 10, 20, 30, 40]
        hook.close()


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_never_began_can_be_closed(name: str) -> None:
    HOOKS[name]().close()


class Listener(CheckpointSaverListener):
    def __init__(self, stop_at: int | None = None) -> None:
        self.told: list[Any] = []
        self._stop_at = stop_at

    def begin(self) -> None:
        self.told.append("begin")

    def before_save(self, session: Any, global_step: int) -> None:
        self.told.append(("before", global_step, tuple(session.checkpoints.saved)))

    def after_save(self, session: Any, global_step: int) -> bool | None:
        self.told.append(("after", global_step, tuple(session.checkpoints.saved)))
        return global_step == self._stop_at

    def end(self, session: Any, global_step: int) -> None:
        self.told.append(("end", global_step))


def test_listeners_are_told_of_every_checkpoint_before_and_after() -> None:
    listener = Listener()
    run_all(make_session([CheckpointSaver(every_steps=10, listeners=[listener]), StopAtStep(last_step=15)]))
    assert listener.told == [
        "begin",
        ("before", 0, ()),
        ("after", 0, (0,)),
        ("before", 10, (0,)),
        ("after", 10, (0, 10)),
        ("before", 15, (0, 10)),
        ("after", 15, (0, 10, 15)),
        ("end", 15),
    ]


class LateStrategy(CountingStrategy):
    """Has written a copy when it is told to."""

    written: Future[None]

    def begin_save(self, prefix: Path, since: DeltaBase | None = None, *, aside: bool = True) -> Future[None]:
        self.written = Future()
        return self.written

    def wait_for(self, outcome: Future[Any]) -> Any:
        # Who waits gets it in time.
        if not outcome.done():
            outcome.set_result(None)
        return outcome.result()


class WritesAt(Hook):
    def __init__(self, *steps: int, error: Exception | None = None) -> None:
        self._steps, self._error = steps, error

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if values.global_step in self._steps:
            written = context.session.strategy.written  # type: ignore[attr-defined]
            written.set_result(None) if self._error is None else written.set_exception(self._error)

    def due_in(self, step: int) -> int | None:
        return min((at - step for at in self._steps if at > step), default=None)


def test_training_continues_while_a_checkpoint_is_written() -> None:
    listener = Listener()
    saver = CheckpointSaver(every_steps=10, background=True, listeners=[listener])
    session = run_all(make_session([WritesAt(14), saver, StopAtStep(last_step=35)], LateStrategy()))
    assert listener.told == [
        "begin",
        # The first and the last one are written at once.
        ("before", 0, ()),
        ("after", 0, (0,)),
        ("before", 10, (0,)),
        ("after", 10, (0, 10)),
        ("before", 20, (0, 10)),
        # The third waits for the second.
        ("after", 20, (0, 10, 20)),
        ("before", 30, (0, 10, 20)),
        ("after", 30, (0, 10, 20, 30)),
        ("before", 35, (0, 10, 20, 30)),
        ("after", 35, (0, 10, 20, 30, 35)),
        ("end", 35),
    ]
    assert session.is_saved


def test_a_checkpoint_that_cannot_be_written_meanwhile_costs_a_warning() -> None:
    saver = CheckpointSaver(every_steps=10, background=True)
    late = WritesAt(14, error=CheckpointError("step 10 could not be saved"))
    session = make_session([late, saver, StopAtStep(last_step=30)], LateStrategy())
    with pytest.warns(UserWarning, match="step 10 could not be saved; training continues"):
        run_all(session)
    assert session.checkpoints.saved == [0, 20, 30]


def test_a_listener_can_end_training() -> None:
    saver = CheckpointSaver(every_steps=10, listeners=[Listener(stop_at=20)])
    session = run_all(make_session([saver, StopAtStep(last_step=100)]))
    assert (session.global_step, session.stopped_by) == (20, "Listener")


def test_final_ops_see_the_final_values_and_are_not_called_after_an_error() -> None:
    hook = FinalOps(lambda session: int(session.read()["global_step"]))
    run_all(make_session([hook, StopAtStep(last_step=7)]))
    assert hook.final_ops_values == 7
    with pytest.raises(RuntimeError):
        run_all(make_session([hook, StopAtStep(last_step=7)], CountingStrategy(fail_at=3)))
    assert hook.final_ops_values is None


def test_feed_fn_writes_before_the_steps_that_it_is_for() -> None:
    fed: list[int] = []

    def feed(step: int) -> Mapping[str, Any]:
        fed.append(step)
        return {"learning_rate": 1 / (1 + step)}

    session = run_all(make_session([FeedFn(feed, every_steps=4), StopAtStep(last_step=10)], WithLearningRate()))
    assert fed == [0, 4, 8]
    assert session.learning_rate() == pytest.approx(1 / 9)
    assert session.strategy.written["optimizer/learning_rate"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"state/nope": 1.0}, ["state/nope", "learning_rate, global_step"]),
        ({"global_step": [1, 2]}, ["global_step", "(2,)", "()"]),
    ],
)
def test_what_cannot_be_fed_is_named(values: Mapping[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        run_all(make_session([FeedFn(lambda step: values), StopAtStep(last_step=3)]))
    for words in said:
        assert words in str(error.value)


class WithLearningRate(CountingStrategy):
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"global_step": (), "optimizer/learning_rate": ()}


def test_workers_begin_one_after_the_other() -> None:
    strategy, seen = CountingStrategy(), []
    strategy.num_replicas = 3

    class Looks(Hook):
        def after_run(self, context: Any, values: Any) -> None:
            seen.append((values.global_step, len(strategy.employed)))

    run_all(make_session([GlobalStepWaiter(20), Looks(), StopAtStep(last_step=100)], strategy))
    assert {number for step, number in seen if step < 20} == {1}
    assert {number for step, number in seen if 20 <= step < 40} == {2}
    assert {number for step, number in seen if step >= 40} == {3}


def test_where_a_step_needs_all_workers_none_can_begin_later() -> None:
    class AllTogether(CountingStrategy):
        set_active = Strategy.set_active

    strategy = AllTogether()
    strategy.num_replicas = 2
    with pytest.raises(ConfigError, match=r"strategy=counting: every step needs all workers"):
        run_all(make_session([GlobalStepWaiter(20), StopAtStep(last_step=100)], strategy))


def test_early_stopping_waits_for_so_many_validations_without_a_gain() -> None:
    hooks = [Validates(0.5, 0.4, 0.45, 0.39, 0.41, 0.42, 0.43), EarlyStopping(patience=2)]
    session = run_all(make_session([*hooks, StopAtStep(last_step=1000)]))
    assert (session.global_step, session.stopped_by) == (60, "EarlyStopping")


def test_early_stopping_by_delta_and_direction() -> None:
    losses = Validates(0.5, 0.4, 0.3)
    by_delta = EarlyStopping("val_loss", patience=1, min_delta=0.2)
    session = run_all(make_session([losses, by_delta, StopAtStep(last_step=1000)]))
    assert session.global_step == 20
    wrong_way = EarlyStopping("accuracy", patience=1, mode="min")
    session = run_all(make_session([losses, wrong_way, StopAtStep(last_step=1000)]))
    assert session.global_step == 20


def test_a_metric_says_itself_what_is_better() -> None:
    def with_metric(direction: str | None) -> Any:
        hooks = [Validates(0.5, 0.4, 0.3, 0.35), EarlyStopping("accuracy", patience=1)]
        session = make_session([*hooks, StopAtStep(last_step=1000)])
        session.spec.model.metrics = [SimpleNamespace(name="accuracy", _direction=direction)]
        return session

    assert run_all(with_metric("up")).global_step == 40
    with pytest.raises(ConfigError, match=r"EarlyStopping.metric=accuracy: say which .* mode=min or mode=max"):
        run_all(with_metric(None))


def test_a_metric_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"EarlyStopping.metric=auc: validation reports loss, accuracy"):
        run_all(make_session([Validates(0.5), EarlyStopping("auc"), StopAtStep(last_step=1000)]))


def test_the_best_checkpoint_is_kept_and_known_to_the_next_run(tmp_path: Path) -> None:
    def run(*losses: float, restorable: int | None = None, last_step: int) -> int:
        hooks = [Validates(*losses), BestCheckpoint(), StopAtStep(last_step=last_step)]
        run_all(make_session(hooks, checkpoints=in_folder(tmp_path, restorable=restorable)))
        record = json.loads((tmp_path / "best" / "validation.json").read_text())
        (step,) = Checkpoints(tmp_path / "best").steps()
        assert record["global_step"] == step
        return step

    assert run(0.5, 0.3, 0.4, float("nan"), last_step=50) == 20
    # Worse than what an earlier run had.
    assert run(0.4, 0.35, restorable=50, last_step=70) == 20
    assert run(0.4, 0.2, restorable=70, last_step=100) == 90
    values = Checkpoints(tmp_path / "best").read(90)
    assert values is not None
    assert int(values["global_step"]) == 90
    # What is there is not this run's.
    assert run(0.9, 0.8, last_step=20) == 20


def test_the_best_checkpoint_survives_a_cluster_that_goes_back_to_its_beginning(tmp_path: Path) -> None:
    checkpoints = RestorableCheckpoints(folder=tmp_path / "checkpoints")
    hooks = [Validates(0.5, 0.3, 0.4), BestCheckpoint(), CheckpointSaver(), StopAtStep(last_step=30)]
    with pytest.warns(UserWarning, match="restarting the cluster from checkpoints/ckpt-0"):
        run_all(make_session(hooks, FailingOnce(), checkpoints=checkpoints, max_restarts=1))
    assert Checkpoints(tmp_path / "best").steps() == [20]
    assert not list(tmp_path.glob("best-before-*"))


def test_a_best_checkpoint_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("a file is in the way")
    hooks = [Validates(0.5, 0.4), BestCheckpoint(), StopAtStep(last_step=20)]
    with pytest.warns(UserWarning, match=r"kdist: BestCheckpoint: step 20 could not be saved .*; training continues"):
        session = run_all(make_session(hooks, checkpoints=in_folder(tmp_path)))
    assert session.global_step == 20


def test_a_profile_is_taken_when_it_is_due_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, taken = FakeClock(), []

    @contextmanager
    def trace(folder: Path, addresses: Any, duration_ms: int) -> Iterator[None]:
        taken.append([str(folder), clock.now])
        yield
        taken[-1].append(clock.now)

    monkeypatch.setattr("kdist.hooks.profiler._trace", trace)
    strategy = CountingStrategy(clock, secs_per_step=0.1)
    hooks = [Profiler(every_steps=50, duration_ms=300, clock=clock), StopAtStep(last_step=103)]
    run_all(make_session(hooks, strategy, clock=clock))
    (first, *began), *_ = taken
    assert first == "tb/train"
    assert began[1] - began[0] >= 0.3
    assert len(taken) == 2
    assert all(len(trace) == 3 for trace in taken)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GlobalStepWaiter(0), "GlobalStepWaiter.wait_until_step=0"),
        (lambda: FeedFn(lambda step: {}, every_steps=0), "FeedFn.every_steps=0"),
        (Profiler, "Profiler: give every_steps or every_secs"),
        (lambda: Profiler(every_steps=1, duration_ms=0), "Profiler.duration_ms=0"),
        (lambda: EarlyStopping(patience=-1), "EarlyStopping.patience=-1"),
        (lambda: EarlyStopping(mode="up"), "EarlyStopping.mode=up: choose one of auto, min, max"),
        (lambda: BestCheckpoint(mode="up"), "BestCheckpoint.mode=up"),
        (lambda: Export(format="h5"), "Export.format=h5: choose one of tf_saved_model"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], Hook], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        make()


def test_values_are_written_in_the_shape_they_have() -> None:
    session = make_session([], WithLearningRate())
    session.write({"learning_rate": np.float32(0.25)})
    assert session.learning_rate() == 0.25
