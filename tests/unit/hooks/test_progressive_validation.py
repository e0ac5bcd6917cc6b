"""Loss and metrics over the last examples, as predicted before they were trained on."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from fakes import CountingStrategy, FakeCheckpoints, make_session, run_all
from helpers import result_of, tags_of, toy_data

import kdist
from kdist.errors import ClusterError, ConfigError
from kdist.hooks import BestCheckpoint, CheckpointSaver, EarlyStopping, Hook, ProgressiveValidation, StopAtStep
from kdist.run.checkpoint import Checkpoints

X, CLASSES = toy_data(200)
Y = (CLASSES == 0).astype(np.float32)[:, None]


def clicks() -> keras.Model:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    return model


def in_order(context: Any = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)


class Reported(keras.callbacks.Callback):
    """Notes the logs of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def test_it_is_what_keras_predicts_before_it_trains_on_each_batch(run_dir: Path) -> None:
    trainer = kdist.Trainer(clicks, run_dir=run_dir, hooks=[ProgressiveValidation(window=60)])
    history = trainer.fit(in_order, steps=20, verbose=0).history

    model, auc, loss = clicks(), keras.metrics.AUC(), keras.metrics.BinaryCrossentropy()
    for step, (x, y) in enumerate(in_order()):
        if step >= 14:
            predicted = model(x)
            auc.update_state(y, predicted)
            loss.update_state(y, predicted)
        model.train_on_batch(x, y)
    assert history["progressive_auc"] == [pytest.approx(float(auc.result()))]
    assert history["progressive_loss"] == [pytest.approx(float(loss.result()), rel=1e-4)]
    # Neither the value of the whole epoch, nor that of the trained model.
    assert history["progressive_auc"] != history["auc"]
    last = model.evaluate(X[140:], Y[140:], verbose=0, return_dict=True)
    assert history["progressive_loss"] != [pytest.approx(last["loss"], rel=1e-2)]


def test_it_is_reported_with_the_values_of_training(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = Reported()
    hooks = [ProgressiveValidation(window=60), kdist.hooks.LoggingTensor(every_steps=5)]
    trainer = kdist.Trainer(clicks, run_dir=run_dir, hooks=hooks)
    history = trainer.fit(in_order, steps=20, steps_per_epoch=10, callbacks=[callback])
    values = history.history["progressive_auc"]
    assert len(values) == 2
    assert [logs["progressive_auc"] for logs in callback.logs] == values
    assert result_of(run_dir)["metrics"]["train"]["progressive_auc"] == values[-1]
    names = {f"{begin}progressive_{name}" for begin in ("", "epoch_") for name in ("loss", "auc")}
    assert {tag for tag in tags_of(run_dir / "tb" / "train") if "progressive" in tag} == names
    # Of the steps of this line, not of those before it.
    lines = re.findall(
        r"^train \| step +(\d+)/20 \| loss \S+ \| auc \S+ \| progressive_loss \S+ \| progressive_auc (\S+) \|",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert [int(step) for step, _ in lines] == [5, 10, 15, 20]
    assert [lines[1][1], lines[3][1]] == [f"{value:.4f}" for value in values]


def test_a_loop_of_ones_own_sees_it(run_dir: Path) -> None:
    hook = ProgressiveValidation(window=60, metrics=["auc"])
    assert hook.extra_logs() == {}
    with kdist.Trainer(clicks, run_dir=run_dir, hooks=[hook]).session(in_order, steps=5, verbose=0) as session:
        while not session.should_stop():
            values = session.run()
    logs = session.training_logs(values.totals)
    assert list(logs) == ["loss", "auc", "progressive_auc"]
    assert logs["progressive_auc"] == hook.extra_logs()["progressive_auc"]


class FailingAt15(CountingStrategy):
    """Fails once, as a cluster does."""

    def run(self, num_steps: int, *args: Any) -> Any:
        if self.runs and self.step + num_steps == 15 and self.stopped == 0:
            raise ClusterError("ps:0 is lost")
        return super().run(num_steps, *args)


class Stepwise(Hook):
    """Makes runs short."""

    def due_in(self, step: int) -> int:
        return 1


def test_after_a_failure_the_window_begins_anew() -> None:
    # Steps have 8 examples, and their number as loss.
    hook = ProgressiveValidation(window=8 * 100)
    checkpoints = FakeCheckpoints(saved=[10], restorable=10)
    session = make_session(
        [hook, Stepwise(), StopAtStep(last_step=16)], FailingAt15(), checkpoints=checkpoints, max_restarts=1
    )
    with pytest.warns(UserWarning, match="ps:0 is lost"):
        run_all(session)
    assert hook.extra_logs() == {"progressive_loss": np.mean(range(11, 17))}


class Watch(Hook):
    def begin(self, session: Any) -> None:
        self.seen: list[tuple[int, float]] = []

    def after_progressive_validation(self, session: Any, logs: Any) -> None:
        self.seen.append((session.global_step, logs["progressive_loss"]))


def test_hooks_get_each_window_of_new_examples() -> None:
    watch = Watch()
    run_all(make_session([ProgressiveValidation(8 * 20), Stepwise(), watch, StopAtStep(last_step=70)]))
    assert watch.seen == [(20, 10.5), (40, 30.5), (60, 50.5)]


def test_early_stopping_and_the_best_checkpoint_watch_it_without_validation_data(tmp_path: Path) -> None:
    # The loss grows.
    early = EarlyStopping("progressive_loss", patience=2)
    hooks = [ProgressiveValidation(8 * 20), Stepwise(), early, BestCheckpoint("progressive_loss")]
    session = make_session(
        [*hooks, StopAtStep(last_step=500)], checkpoints=FakeCheckpoints(folder=tmp_path / "checkpoints")
    )
    # Of data that it has none of, it takes no notice.
    with session:
        session.publish_validation({"loss": 0.0})
        while not session.should_stop():
            session.run()
    assert (session.global_step, session.stopped_by) == (60, "EarlyStopping")
    assert Checkpoints(tmp_path / "best").steps() == [20]


class Ahead(CountingStrategy):
    """Has always applied three steps that no hook has seen."""

    is_idle = False

    def global_step(self) -> int:
        return self.step + 3 * (self.step > 0)

    def portions(self, names: Any = None) -> Iterator[Mapping[str, np.ndarray]]:
        yield {"global_step": np.array(self.global_step())}


@pytest.mark.parametrize(
    "hook", [BestCheckpoint("progressive_loss"), EarlyStopping("progressive_loss", 9, restore_best=True)]
)
def test_what_is_kept_in_the_middle_of_training_bears_its_own_step(hook: Hook, tmp_path: Path) -> None:
    checkpoints = FakeCheckpoints(folder=tmp_path / "checkpoints")
    hooks = [ProgressiveValidation(8 * 20), Stepwise(), hook, StopAtStep(last_step=100)]
    session = make_session(hooks, Ahead(), checkpoints=checkpoints)
    with session:
        while session.global_step < 50:
            session.run()
        kept = checkpoints.beside("best" if isinstance(hook, BestCheckpoint) else "early_stopping")
        (step,) = kept.steps()
        stored = kept.read(step)
        assert stored is not None
        assert int(stored["global_step"]) == step == 23


def test_the_metric_says_what_is_better() -> None:
    hooks = [ProgressiveValidation(8 * 20), Stepwise(), EarlyStopping("progressive_auc")]
    session = make_session([*hooks, StopAtStep(last_step=500)])
    session.spec.model.metrics = [SimpleNamespace(name="auc", _direction="up")]
    with pytest.raises(ConfigError, match=r"metric=progressive_auc: progressive validation reports progressive_loss$"):
        run_all(session)


def test_a_fit_without_validation_data_is_stopped_by_it(run_dir: Path) -> None:
    hooks = [ProgressiveValidation(60), EarlyStopping("progressive_auc", min_delta=1.0, patience=2), CheckpointSaver()]
    trainer = kdist.Trainer(clicks, run_dir=run_dir, hooks=hooks)
    trainer.fit(in_order().repeat(), verbose=0)
    assert trainer.result.stopped_by == "EarlyStopping"
    assert trainer.result.examples >= 180


@pytest.mark.parametrize("hook", [EarlyStopping("progressive_auc"), BestCheckpoint("progressive_auc")])
def test_without_it_a_hook_that_watches_it_is_refused(hook: Hook, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.metric=progressive_auc: nothing reports it; add the hook Progressive"):
        kdist.Trainer(clicks, run_dir=run_dir, hooks=[hook]).fit(X, Y, steps=2, verbose=0)


def test_a_metric_that_the_model_does_not_have_is_named(run_dir: Path) -> None:
    hook = ProgressiveValidation(metrics=["auc", "recall"])
    with pytest.raises(ConfigError, match=r"ProgressiveValidation\.metrics=recall: the model reports loss, auc$"):
        kdist.Trainer(clicks, run_dir=run_dir, hooks=[hook]).fit(X, Y, steps=2, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, r"ProgressiveValidation\.window=0: must be a whole number, at least 1"),
        ({"window": 0.5}, r"ProgressiveValidation\.window=0\.5: must be a whole number"),
        ({"window": None}, r"ProgressiveValidation\.window=None: must be a whole number"),
        ({"metrics": "auc"}, r"ProgressiveValidation\.metrics=auc: must be a list of names of metrics"),
        ({"metrics": [keras.metrics.AUC()]}, "must be a list of names of metrics that the model is compiled with"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProgressiveValidation(**arguments)
