"""The behaviour of `Trainer` on which a user may rely, seen in one process."""

import inspect
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, tags_of, toy_data
from keras.src.random.seed_generator import global_seed_generator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kdist
from kdist.config.schema import ClusterConfig
from kdist.errors import ConfigError
from kdist.hooks import CheckpointSaver, Hook, StopAtStep
from kdist.run.checkpoint import Checkpoints
from kdist.strategies.single import Single

X, Y = toy_data(40)


def fit(trainer: kdist.Trainer, **arguments: Any) -> keras.callbacks.History:
    return trainer.fit(X, Y, **{"batch_size": 10, "verbose": 0, **arguments})


class FailOnce(Hook):
    """Raises the first time that it sees a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step >= self._step:
            self._step = 10**9
            raise RuntimeError("the hook failed")


class Drawer(keras.layers.Layer):
    """Sums up what keras.random gives it without a seed, and notes that it was called."""

    def build(self, shape: Any) -> None:
        self.draws = self.add_weight(shape=(), initializer="zeros", trainable=False, name="draws")
        self.squares = self.add_weight(shape=(), initializer="zeros", trainable=False, name="squares")
        self.lowest = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(1e9), trainable=False, name="low"
        )
        self.called = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False, name="called")

    def call(self, inputs: Any) -> Any:
        draw = keras.random.normal(())
        self.draws.assign_add(draw)
        self.squares.assign_add(draw * draw)
        self.lowest.assign(keras.ops.minimum(self.lowest, keras.ops.min(inputs)))
        self.called.assign(keras.ops.convert_to_tensor(True))
        return inputs


def drawing() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((6,)), Drawer(), keras.layers.Dense(3, activation="softmax")])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    return model


def test_random_numbers_differ_from_step_to_step_and_state_is_exact(run_dir: Path) -> None:
    trainer = kdist.Trainer(drawing, run_dir=run_dir)
    fit(trainer, steps=20)
    layer = trainer.model.layers[0]
    assert layer.squares.numpy() > 1.5 * layer.draws.numpy() ** 2 / 20
    assert layer.lowest.numpy() == X.min()
    assert layer.called.numpy()


def test_the_global_random_state_stays_as_it_was(run_dir: Path) -> None:
    model = drawing()
    before = global_seed_generator().state.numpy()
    fit(kdist.Trainer(model, run_dir=run_dir), steps=3)
    np.testing.assert_array_equal(global_seed_generator().state.numpy(), before)


def test_a_resumed_run_takes_the_new_learning_rate(run_dir: Path) -> None:
    fit(kdist.Trainer(lambda: models.mlp(keras.optimizers.SGD(0.1)), run_dir=run_dir), steps=4)
    trainer = kdist.Trainer(lambda: models.mlp(keras.optimizers.SGD(0.01)), run_dir=run_dir)
    fit(trainer, steps=8)
    assert float(trainer.model.optimizer.learning_rate) == pytest.approx(0.01)
    assert int(trainer.model.optimizer.iterations) == 8


def test_what_follows_a_damaged_checkpoint_is_never_deleted_for_it(run_dir: Path) -> None:
    save_all = [kdist.hooks.CheckpointSaver(every_steps=4, keep=1)]
    fit(
        kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[kdist.hooks.CheckpointSaver(every_steps=4, keep=3)]), steps=12
    )
    for step in (8, 12):
        os.truncate(run_dir / "checkpoints" / f"ckpt-{step}.index", 9)
    with pytest.warns(
        UserWarning, match=r"ckpt-(8|12) is damaged|checkpoints after step 4 are moved to checkpoints-be"
    ):
        fit(kdist.Trainer(models.mlp, run_dir=run_dir, hooks=save_all), steps=6)
    assert Checkpoints(run_dir / "checkpoints").steps() == [6]
    assert Checkpoints(run_dir / "checkpoints-before-1").steps() == [8, 12]
    again = kdist.Trainer(models.mlp, run_dir=run_dir, resume="must", hooks=save_all)
    fit(again, steps=8)
    assert again.result.global_step == 8


def random_and_averaged() -> keras.Model:
    """Everything that a step may leave behind: slots, averages, statistics, random states."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8), "sparse_categorical_crossentropy")
    return model


def values_of(checkpoints: Checkpoints, step: int) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(checkpoints.path(step)))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (5, "arrays"),
        pytest.param(None, "dataset", marks=pytest.mark.long),
        pytest.param(None, "arrays", marks=pytest.mark.long),
        pytest.param(5, "dataset", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_comes_to_what_it_would_have_come_to(run_dir: Path, seed: int | None, kind: str) -> None:
    def fit_to(steps: int) -> dict[str, np.ndarray]:
        hooks = [CheckpointSaver(every_steps=7)]
        trainer = kdist.Trainer(random_and_averaged, run_dir=run_dir, seed=seed, hooks=hooks, steps_per_call=1)
        x = (X, Y) if kind == "arrays" else (tf.data.Dataset.from_tensor_slices((X, Y)).batch(10),)
        trainer.fit(*x, batch_size=10, steps=steps, verbose=0)
        return values_of(checkpoints, steps)

    checkpoints = Checkpoints(run_dir / "checkpoints")
    whole = fit_to(17)
    assert {name.split("/")[0] for name in whole} >= {"parameters", "slots", "state", "global_step", "seed"}
    # 14 and 7 steps are off the boundary of an epoch of 4.
    for step in (17, 14):
        for path in checkpoints.folder.glob(f"ckpt-{step}.*"):
            path.unlink()
        resumed = fit_to(17)
        assert resumed.keys() == whole.keys()
        assert resumed.pop("data_fingerprint", None) == whole.get("data_fingerprint")
        for name, value in ((name, whole[name]) for name in resumed):
            np.testing.assert_allclose(resumed[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_run_without_a_seed_differs_from_the_next(run_dir: Path) -> None:
    seeds = set()
    for resume in ("auto", "never", "never"):
        trainer = kdist.Trainer(models.mlp, run_dir=run_dir, resume=resume)
        fit(trainer, steps=1)
        seeds.add(int(values_of(Checkpoints(run_dir / "checkpoints"), 1)["seed"]))
    assert len(seeds) == 3


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(run_dir: Path, seed: int) -> None:
    with pytest.raises(kdist.ConfigError, match=f"seed={seed}"):
        kdist.Trainer(models.mlp, run_dir=run_dir, seed=seed)


def test_two_trainers_do_not_train_in_one_run_dir_at_once_but_one_after_the_other(run_dir: Path) -> None:
    def trainer() -> kdist.Trainer:
        return kdist.Trainer(models.mlp, run_dir=run_dir)

    with trainer().session(X, Y, batch_size=10, verbose=0) as session:
        session.run()
        before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
        with pytest.raises(kdist.ConfigError, match=r"is in use by this process itself"):
            fit(trainer(), steps=5)
        assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    fit(trainer(), steps=20)
    with pytest.raises(RuntimeError, match="the hook failed"):
        fit(kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[FailOnce(22)]), steps=30)
    fit(trainer(), steps=30)
    assert not (run_dir / ".lock").exists()


def test_epochs_are_numbered_as_by_keras_and_go_on_after_a_resume(run_dir: Path, tmp_path: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    assert fit(trainer, epochs=2).epoch == [0, 1]
    resumed = kdist.Trainer(models.mlp, run_dir=run_dir)
    assert fit(resumed, epochs=5).epoch == [0, 1, 2, 3, 4]
    assert resumed.result.global_step == 20
    fresh = kdist.Trainer(models.mlp, run_dir=tmp_path / "fresh")
    assert fit(fresh, initial_epoch=2, epochs=5).epoch == [2, 3, 4]
    assert fresh.result.global_step == 12
    # A second fit off an epoch's boundary.
    fit(fresh, steps=14)
    assert fit(fresh, epochs=2).epoch == [0, 1]
    assert fresh.result.global_step == 22


def test_a_run_that_began_at_a_later_epoch_resumes_with_the_next_one(run_dir: Path, tmp_path: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 2

    def again(folder: Path, *callbacks: Any, **arguments: Any) -> tuple[list[int], int]:
        trainer = kdist.Trainer(models.mlp, run_dir=folder, callbacks=callbacks)
        return fit(trainer, **arguments).epoch, trainer.result.global_step

    assert again(run_dir, Stop(), initial_epoch=2, epochs=4) == ([2], 4)
    assert again(run_dir, initial_epoch=2, epochs=4) == ([2, 3], 8)
    size = (run_dir / "metrics.csv").stat().st_size
    assert again(run_dir, initial_epoch=2, epochs=4) == ([2, 3], 8)
    assert (run_dir / "metrics.csv").stat().st_size == size
    # A run that began at epoch 0: `initial_epoch` says, as for Keras, where to continue.
    assert again(tmp_path / "other", epochs=2) == ([0, 1], 8)
    assert again(tmp_path / "other", initial_epoch=2, epochs=4) == ([0, 1, 2, 3], 16)


def test_the_steps_of_a_call_follow_those_of_an_execution_unless_they_are_given(run_dir: Path) -> None:
    def build() -> keras.Model:
        model = models.mlp()
        model.compile(model.optimizer, "sparse_categorical_crossentropy", steps_per_execution=5)
        return model

    def steps_per_call(**options: Any) -> int | None:
        request = kdist.Trainer(build, run_dir=run_dir, **options)._fit_of(X, Y)
        return request.training_spec(request.training_data).steps_per_call

    assert steps_per_call() == 5
    assert steps_per_call(steps_per_call=2) == 2


def test_limits_for_trying_a_program_out_hold_as_in_keras(run_dir: Path) -> None:
    before = keras.config.max_epochs(), keras.config.max_steps_per_epoch()
    try:
        keras.config.set_max_epochs(2)
        keras.config.set_max_steps_per_epoch(3)
        trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
        with pytest.warns(UserWarning, match="epochs=5: limited to 2 by keras.config.set_max_epochs"):
            assert fit(trainer, epochs=5).epoch == [0, 1]
        # It is a line of the run like any other.
        assert "epochs=5: limited to 2" in (run_dir / "logs" / "chief-0.log").read_text()
        model = models.mlp()
        with pytest.warns(UserWarning, match="Limiting epochs to 2"):
            model.fit(X, Y, batch_size=10, epochs=5, verbose=0)
        assert trainer.result.global_step == int(model.optimizer.iterations)
    finally:
        keras.config.set_max_epochs(before[0])
        keras.config.set_max_steps_per_epoch(before[1])


def test_a_fit_after_a_failed_one_goes_on_from_its_last_checkpoint(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[CheckpointSaver(every_steps=10), FailOnce(25)])
    with pytest.raises(RuntimeError, match="the hook failed"):
        fit(trainer, steps=40)
    fit(trainer, steps=40)
    assert (trainer.result.status, trainer.result.global_step, trainer.result.gradients.applied) == ("done", 40, 20)


def test_a_fit_that_failed_before_it_began_does_not_change_how_it_resumes(run_dir: Path) -> None:
    fit(kdist.Trainer(models.mlp, run_dir=run_dir), steps=10)

    class FailAtFirst(Hook):
        begun = False

        def begin(self, session: Any) -> None:
            if not self.begun:
                self.begun = True
                raise RuntimeError("not yet")

    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, resume="never", hooks=[FailAtFirst()])
    with pytest.raises(RuntimeError, match="not yet"):
        fit(trainer, steps=10)
    fit(trainer, steps=10)
    assert trainer.result.gradients.applied == 10


def test_the_first_of_two_ends_counts(tmp_path: Path) -> None:
    for last_step in (3, 9):
        trainer = kdist.Trainer(models.mlp, run_dir=tmp_path / str(last_step), hooks=[StopAtStep(last_step=last_step)])
        fit(trainer, steps=5)
        assert trainer.result.global_step == min(5, last_step)


@pytest.mark.parametrize(
    ("name", "value", "at_least"),
    [("batch_size", 0, 1), ("batch_size", 2.5, 1), ("steps_per_epoch", -1, 1), ("epochs", -1, 0), ("steps", 0, 1)],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(run_dir: Path, name: str, value: Any, at_least: int) -> None:
    with pytest.raises(kdist.ConfigError, match=rf"{name}=.*at least {at_least}$"):
        fit(kdist.Trainer(models.mlp, run_dir=run_dir), **{name: value})


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kdist.ConfigError, match="is a file"):
        kdist.Trainer(models.mlp, run_dir=tmp_path / "file")


def test_a_dataset_without_a_batch_is_said_to_be_empty(run_dir: Path) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: False).batch(4)
    with pytest.raises(kdist.TaskError, match="not a single batch"):
        kdist.Trainer(models.mlp, run_dir=run_dir).fit(dataset, steps=3, verbose=0)


@pytest.mark.parametrize("draws", [False, True])
def test_a_process_that_trains_alone_traces_its_data_once(draws: bool, run_dir: Path) -> None:
    x, y = toy_data()
    traced = []

    def batches(context: kdist.DataContext) -> tf.data.Dataset:
        traced.append(context)
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    layers = [keras.layers.Dropout(0.5)] if draws else []
    model = keras.Sequential([*layers, keras.layers.Dense(3, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    kdist.Trainer(model, run_dir=run_dir).fit(batches, steps=2, verbose=0)
    assert len(traced) == 1


def test_a_variable_that_tensorflow_cannot_send_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdist.strategies.prepared_training._MOST_BYTES", 100)
    x, y = toy_data()
    trainer = kdist.Trainer(models.mlp, cluster="2ps2w", run_dir=run_dir)
    with pytest.raises(ConfigError, match=r"dense/kernel has \d+ bytes, and TensorFlow sends at most 2 GiB at once"):
        trainer.plan(x, y)


def test_the_plan_of_an_earlier_run_does_not_stay(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "placement.txt").touch()
    fit(kdist.Trainer(models.mlp, run_dir=run_dir), steps=1)
    assert not (run_dir / "placement.txt").exists()


def test_a_fit_that_begins_at_an_earlier_step_keeps_its_checkpoints(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[CheckpointSaver(every_steps=10)])
    fit(trainer, steps=100)
    trainer.model.compile("sgd", "sparse_categorical_crossentropy")
    fit(trainer, steps=30)
    weights = trainer.model.get_weights()
    again = kdist.Trainer(lambda: models.mlp("sgd"), run_dir=run_dir)
    fit(again, steps=30)
    assert again.result == trainer.result
    for mine, theirs in zip(again.model.get_weights(), weights):
        np.testing.assert_array_equal(mine, theirs)


def test_lists_of_numbers_are_refused(run_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"numpy\.asarray"):
        kdist.Trainer(models.mlp, run_dir=run_dir).fit(X.tolist(), Y.tolist(), verbose=0)


def test_nothing_is_saved_of_a_diverged_run(run_dir: Path) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e30), "mse")
        return model

    trainer = kdist.Trainer(build, run_dir=run_dir, hooks=[kdist.hooks.NanTensor(fail_on_nan_loss=False)])
    fit(trainer, steps=50)
    assert (trainer.result.status, trainer.result.stopped_by) == ("done", "NanTensor")
    assert Checkpoints(run_dir / "checkpoints").steps() == [0]


def test_leaving_a_session_early_is_said(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    with trainer.session(X, Y, batch_size=10, verbose=0) as session:
        session.run()
    assert (trainer.result.status, trainer.result.stopped_by) == ("done", "the caller")


def test_ctrl_c_ends_a_validation_and_saves(run_dir: Path) -> None:
    read = []

    def examples() -> Iterator[Any]:
        for i in range(5000):
            if i == 10:
                os.kill(os.getpid(), signal.SIGINT)
            read.append(i)
            yield X[i % len(X)], Y[i % len(X)]

    types = (tf.TensorSpec([6], tf.float32), tf.TensorSpec([], tf.int64))
    data = tf.data.Dataset.from_generator(examples, output_signature=types).batch(1)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, steps=8, validation_data=data)
    assert len(read) < 5000
    assert trainer.result.status == "preempted"
    assert trainer.result.metrics["validation"] == {}
    assert Checkpoints(run_dir / "checkpoints").steps()[-1] == trainer.result.global_step == 4


def test_training_may_end_with_the_values_of_the_best_validation(run_dir: Path) -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    x = np.ones((8, 1), np.float32)
    hooks = [kdist.hooks.EarlyStopping(patience=3, restore_best=True), kdist.hooks.CheckpointSaver(every_steps=1)]
    trainer = kdist.Trainer(model, run_dir=run_dir, hooks=hooks)
    # Training goes from 0 to 5, and validation is best at 2.
    history = trainer.fit(x, 5 * x, 8, epochs=30, validation_data=(x, 2 * x)).history["val_loss"]
    best = int(np.argmin(history)) + 1
    assert (trainer.result.global_step, trainer.result.stopped_by) == (best + 3, "EarlyStopping")
    assert float(trainer.model.layers[0].kernel[0, 0]) == pytest.approx(5 - 5 * 0.9**best)
    assert trainer.result.metrics["validation"]["loss"] == pytest.approx(history[best - 1])
    assert trainer.evaluate(x, 2 * x) == pytest.approx(history[best - 1])
    assert keras.saving.load_model(run_dir / "model.keras").evaluate(x, 2 * x) == pytest.approx(history[best - 1])
    # So does what is resumed.
    saved = Checkpoints(run_dir / "checkpoints").read(best + 3)
    assert saved is not None
    assert float(saved["parameters/dense/kernel"][0, 0]) == pytest.approx(5 - 5 * 0.9**best)


class StopTraining(keras.callbacks.Callback):
    """Says so after some batches, as a user's callback may."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 6


class Terminate(Hook):
    """Sends this process what a scheduler sends."""

    def after_run(self, context: Any, values: Any) -> None:
        if values.global_step >= 7:
            os.kill(os.getpid(), signal.SIGTERM)

    def due_in(self, step: int) -> int | None:
        return 7 - step if step < 7 else 1


def endless(length: str) -> Any:
    """Batches without an end, in a dataset or by a function."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    return dataset.repeat() if length == "infinite" else lambda context: dataset


@pytest.mark.parametrize("length", in_short(["infinite", "of a function"], {"of a function"}))
def test_without_an_end_training_ends_by_a_hook(length: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = [StopAtStep(last_step=7), CheckpointSaver(every_steps=3, keep=9)]
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=hooks)
    history = trainer.fit(endless(length), validation_data=(X, Y), validation_every_steps=2)
    assert (trainer.result.global_step, trainer.result.stopped_by) == (7, "StopAtStep")
    assert history.epoch == [0]
    assert Checkpoints(run_dir / "checkpoints").steps() == [0, 3, 6, 7]
    printed = capsys.readouterr().out
    assert [step for step in range(8) if f"valid | step      {step}" in printed] == [2, 4, 6, 7]
    assert "no end is given" not in printed


def test_without_an_end_training_ends_when_it_no_longer_improves(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[kdist.hooks.EarlyStopping(min_delta=9.0, patience=2)])
    trainer.fit(endless("infinite"), validation_data=(X, Y), validation_every_steps=5, verbose=0)
    assert (trainer.result.global_step, trainer.result.stopped_by) == (15, "EarlyStopping")


def test_without_an_end_training_ends_by_a_callback(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    trainer.fit(endless("infinite"), callbacks=[StopTraining()])
    assert (trainer.result.global_step, trainer.result.stopped_by) == (7, "stop_training")
    assert (
        "steps     no end is given: training ends by a hook, a callback, a signal or Ctrl-C\n"
        in capsys.readouterr().out
    )


def test_without_an_end_training_ends_by_a_signal(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[Terminate()])
    with pytest.raises(SystemExit):
        trainer.fit(endless("infinite"), verbose=0)
    assert trainer.result.status == "preempted"
    assert Checkpoints(run_dir / "checkpoints").steps()[-1] == trainer.result.global_step >= 7


def test_several_epochs_of_unknown_length_are_refused(run_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^epochs=2: the length of the data is not known; give steps \(train.steps\)"
    ):
        kdist.Trainer(models.mlp, run_dir=run_dir).fit(endless("infinite"), epochs=2, verbose=0)


@pytest.mark.parametrize("hook", [kdist.hooks.EarlyStopping(), kdist.hooks.BestCheckpoint()])
def test_a_hook_that_waits_for_validations_is_refused_without_any(hook: kdist.hooks.Hook, run_dir: Path) -> None:
    x, y = toy_data()
    with pytest.raises(kdist.ConfigError, match=rf"{type(hook).__name__}: needs validation data"):
        kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[hook]).fit(x, y, steps=2, verbose=0)


@pytest.mark.long
def test_histograms_and_hyperparameters_are_there_if_asked_for(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(
        models.batch_normalized,
        run_dir=run_dir,
        hooks=[kdist.hooks.HistogramSaver(every_steps=5)],
        hparams={"units": 8, "sizes": [8, 3], "note": None},
    )
    trainer.fit(x, y, steps=10, verbose=0)
    names = ("dense/kernel", "dense/bias", "batch_normalization/gamma", "batch_normalization/beta")
    names += ("dense_1/kernel", "dense_1/bias")
    events = EventAccumulator(str(run_dir / "tb" / "train")).Reload()
    tags = {f"{kind}/{name}" for kind in ("weights", "gradients") for name in names}
    assert tags <= set(events.Tags()["tensors"])
    assert [event.step for event in events.Tensors("gradients/dense/kernel")] == [5, 10]
    counts = tf.make_ndarray(events.Tensors("gradients/dense/kernel")[-1].tensor_proto)[:, 2]
    assert counts.sum() == 6 * 8
    # The chief's look at a batch is no step: what it computes with is put in and stays as it is.
    assert int(trainer.model.optimizer.iterations) == 10
    assert {"final/train_loss", "_hparams_/session_start_info"} <= tags_of(run_dir / "tb" / "hparams")


def test_an_argument_counts_more_than_the_cluster_config(run_dir: Path) -> None:
    config = ClusterConfig("local", start_timeout=100, step_timeout=50)
    trainer = kdist.Trainer(models.mlp, config, run_dir=run_dir, start_timeout=10, max_worker_restarts=0)
    cluster = trainer._config.cluster
    assert (cluster.start_timeout, cluster.step_timeout, cluster.max_worker_restarts) == (10, 50, 0)
    assert config == ClusterConfig("local", start_timeout=100, step_timeout=50)
    for option in ("start_timeout", "step_timeout", "max_worker_restarts"):
        with pytest.raises(ConfigError, match=rf"cluster\.{option}="):
            kdist.Trainer(models.mlp, config, run_dir=run_dir, **{option: -1})


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_the_arguments_of_keras_are_taken_in_its_order(name: str) -> None:
    def arguments(owner: Any) -> list[str]:
        parameters = inspect.signature(getattr(owner, name)).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert arguments(kdist.Trainer) == arguments(keras.Model)


def test_evaluate_returns_what_keras_returns(run_dir: Path) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, "softmax")])
        metrics = ["accuracy", keras.metrics.F1Score(name="f1")]
        model.compile("sgd", "categorical_crossentropy", metrics=metrics)
        return model

    trainer, labels = kdist.Trainer(build, run_dir=run_dir), keras.utils.to_categorical(Y, 3)
    trainer.fit(X, labels, verbose=0)
    expected, found = trainer.model.evaluate(X, labels, verbose=0), trainer.evaluate(X, labels)
    assert [type(value) for value in found] == [type(value) for value in expected] == [float, float, np.ndarray]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other)
    named = trainer.evaluate(X, labels, return_dict=True)
    assert set(named) == {"loss", "accuracy", "f1"}
    assert named["accuracy"] == found[1]


def test_evaluate_and_predict_call_callbacks_and_show_what_verbose_says(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, seen = kdist.Trainer(models.mlp, run_dir=run_dir), []

    class Note(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(("test", batch))

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(("predict", batch))

    fit(trainer, steps=1)
    trainer.evaluate(X, Y, 20, callbacks=Note())
    trainer.predict(X, 20, callbacks=[Note()])
    assert seen == [("test", 0), ("test", 1), ("predict", 0), ("predict", 1)]
    # Nobody looks.
    assert "step" not in capsys.readouterr().out
    trainer.evaluate(X, Y, 20, verbose=2)
    assert "2/2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="verbose=7: choose one of auto, 0, 1, 2, 3"):
        trainer.evaluate(X, Y, verbose=7)


@pytest.mark.parametrize("dtype", in_short(["<U7", "S7", object, "Series"], {"<U7"}))
def test_strings_that_fit_takes_are_evaluated_and_predicted(run_dir: Path, dtype: Any) -> None:
    def build() -> keras.Model:
        words = keras.layers.Input((1,), dtype="string")
        rows = keras.layers.Embedding(8, 2)(keras.layers.Hashing(8)(words))
        model = keras.Model(words, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile("sgd", "mse")
        return model

    words, y = np.array(["apple", "pear", "plum", "kiwi"] * 10), np.arange(40.0)
    x: Any = pytest.importorskip("pandas").Series(words) if dtype == "Series" else words[:, None].astype(dtype)
    trainer = kdist.Trainer(build, run_dir=run_dir)
    trainer.fit(x, y, verbose=0)
    tensor = tf.constant(words[:, None])
    assert trainer.evaluate(x, y) == pytest.approx(trainer.model.evaluate(tensor, y, verbose=0))
    np.testing.assert_allclose(trainer.predict(x), trainer.model.predict(tensor, verbose=0))


def test_what_is_no_data_is_refused_by_name(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    for use in (trainer.evaluate, trainer.predict):
        with pytest.raises(ConfigError, match="x is a range; give arrays, a tf.data.Dataset"):
            use(range(40))
        with pytest.raises(ValueError, match="must be arrays"):
            use([1.0, 2.0])


def test_a_strategy_of_ones_own_takes_arguments_that_cannot_be_copied(run_dir: Path) -> None:
    class Guarded(Single):
        def __init__(self, *, lock: Any) -> None:
            super().__init__()
            self.lock = lock

    lock = threading.Lock()
    trainer = kdist.Trainer(models.mlp, strategy=Guarded, run_dir=run_dir, arguments={"lock": lock})
    fit(trainer, steps=1)
    assert trainer.result.config is not None
    assert trainer.result.config["strategy"]["arguments"] == {}


def test_a_session_splits_data_as_fit_does(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    with trainer.session(X, Y, validation_split=0.25, batch_size=10, steps=3, verbose=0) as session:
        while not session.should_stop():
            session.run()
    assert "val_loss" not in trainer.result.metrics["train"]
    assert trainer.result.metrics["validation"]["loss"] > 0


def test_an_argument_that_fit_has_not_is_named(run_dir: Path) -> None:
    with (
        pytest.raises(TypeError, match="^foo: fit and session have no such argument"),
        kdist.Trainer(models.mlp, run_dir=run_dir).session(X, Y, foo=1),
    ):
        pytest.fail("it has started")
    assert not run_dir.exists()


@pytest.mark.parametrize("export_max_bytes", [1.5e9, pytest.param(float("inf"), marks=pytest.mark.long)])
def test_a_number_of_bytes_may_be_written_as_a_float(export_max_bytes: float, run_dir: Path) -> None:
    fit(trainer := kdist.Trainer(models.mlp, run_dir=run_dir, export_max_bytes=export_max_bytes), steps=1)
    assert trainer.result.status == "done"


@pytest.mark.parametrize("export_max_bytes", [0.5, -0.5, True, "2GB", float("nan")])
def test_other_numbers_of_bytes_are_refused(export_max_bytes: Any) -> None:
    with pytest.raises(kdist.ConfigError, match="run.export_max_bytes=.*: must be a whole number"):
        kdist.Trainer(models.mlp, export_max_bytes=export_max_bytes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clutser": "2ps2w"}, r"Trainer\(clutser=...\): there is no such argument; did you mean cluster\?"),
        ({"placment": "greedy"}, r"Trainer\(placment=...\): .*did you mean placement\?"),
        ({"colour": "red"}, r"Trainer\(colour=...\): there is no such argument; strategies take placement"),
        ({"model_dir": "runs"}, r"did you mean run_dir\?"),
        (
            {"cluster": "hosts", "ps": ["h:1"], "worker": ["h:2"]},
            r"Trainer\(ps=...\): .*; it belongs to the cluster: cluster=kdist.ClusterConfig\(..., ps=...\)",
        ),
        ({"hooks": [CheckpointSaver]}, r"hooks: CheckpointSaver is a class; give an instance, CheckpointSaver\(...\)"),
        (
            {"hooks": [keras.callbacks.EarlyStopping()]},
            r"hooks: EarlyStopping is a Keras callback; give it to fit\(callbacks=\[...\]\)",
        ),
        ({"hooks": ["checkpoint"]}, r"hooks: 'checkpoint' is a str, not a kdist.hooks.Hook"),
    ],
)
def test_an_argument_that_is_not_known_is_refused_with_the_one_that_was_meant(
    arguments: dict[str, Any], message: str, run_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        kdist.Trainer(models.mlp, **{"run_dir": run_dir, **arguments})
