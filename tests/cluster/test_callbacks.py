"""Under every strategy, what Keras callbacks change in the chief's model reaches the tasks."""

import csv
import os
import threading
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, tags_of, toy_batches, toy_data

import kdist

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

callbacks = keras.callbacks
STRATEGIES = {
    "parameter_server": ("2ps2w", {}),
    "sync_replicas": ("2ps2w", {}),
    "mirrored": ("local", {"devices": 2}),
    "multi_worker_mirrored": ("2w", {}),
}


class ValidatesZeros(callbacks.Callback):
    """Validates a model whose weights are zero, and gives it its own back."""

    def on_test_begin(self, logs: Any = None) -> None:
        self.weights = self.model.get_weights()
        self.model.set_weights([0 * weight for weight in self.weights])

    def on_test_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.weights)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("parameter_server", marks=pytest.mark.long),
        pytest.param("sync_replicas", marks=pytest.mark.long),
        "mirrored",
        # As `mirrored`, in two processes.
        pytest.param("multi_worker_mirrored", marks=pytest.mark.long),
    ],
)
def test_what_callbacks_change_reaches_the_tasks_and_what_they_know_comes_back(strategy: str, tmp_path: Path) -> None:
    x, y = toy_data(512)
    cluster, options = STRATEGIES[strategy]
    trainer = kdist.Trainer(models.mlp, cluster, strategy, run_dir=tmp_path / "run", **options)
    before = trainer.model.get_weights()
    # Never good enough: neither is any value, nor any gain.
    stop = callbacks.EarlyStopping("loss", patience=3, baseline=-1.0, min_delta=100.0)
    ended: list[str] = []
    history = trainer.fit(
        x,
        y,
        batch_size=16,
        epochs=9,
        validation_data=(x, y),
        verbose=0,
        callbacks=[
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch else rate),
            callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
            callbacks.CSVLogger(tmp_path / "log.csv"),
            callbacks.LambdaCallback(on_train_end=ended.extend),
            ValidatesZeros(),
            stop,
        ],
    )
    # What callbacks add to the logs of an epoch is for the callbacks of its end, as in Keras.
    assert ended == [name for name in history.history if name != "learning_rate"]
    num_classes = trainer.model.output_shape[-1]
    np.testing.assert_allclose(history.history["val_loss"], np.log(num_classes), rtol=1e-5)
    assert (stop.stopped_epoch, stop.wait) == (2, 3)
    assert trainer.result.stopped_by == "stop_training"
    assert trainer.result.global_step == 3 * 512 // 16 // (1 if strategy == "parameter_server" else 2)
    assert history.epoch == [0, 1, 2]
    assert history.history["learning_rate"][1:] == [0.0, 0.0]
    assert len(list(csv.DictReader((tmp_path / "log.csv").open()))) == 3
    # From the second epoch on nothing moved, on no task.
    first, third = (keras.saving.load_model(tmp_path / f"{epoch}.keras").get_weights() for epoch in (1, 3))
    for was, after_first, after_third, ours in zip(before, first, third, trainer.model.get_weights()):
        assert not np.array_equal(was, after_first)
        np.testing.assert_array_equal(after_third, after_first)
        np.testing.assert_array_equal(ours, after_first)


class SetsBias(callbacks.Callback):
    """Sets the last bias to ten in the middle of the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 6:
            bias = self.model.layers[-1].bias
            bias.assign(np.full(bias.shape, 10.0))


def test_a_batch_event_sees_each_step_and_can_set_weights(tmp_path: Path) -> None:
    x, y = toy_data(64)
    trainer = kdist.Trainer(models.mlp, "1ps2w", run_dir=tmp_path)
    trainer.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[SetsBias()])
    assert trainer.result.global_step == 8
    assert trainer.result.gradients.applied == 8
    assert abs(trainer.model.layers[-1].bias.numpy() - 10).max() < 1


def test_hooks_feed_workers_that_begin_one_after_the_other(tmp_path: Path) -> None:
    x, y = toy_data(512)
    seen: dict[int, float] = {}
    worked: dict[int, set[int]] = {}

    class Looks(kdist.hooks.Hook):
        def after_run(self, context: Any, values: Any) -> None:
            seen[values.global_step] = float(context.session.read()["optimizer/learning_rate"])
            worked[values.global_step] = set(values.gradient_counts)

    hooks = kdist.hooks
    trainer = kdist.Trainer(
        models.mlp,
        "1ps2w",
        run_dir=tmp_path,
        steps_per_call=4,
        hooks=[
            hooks.FeedFn(lambda step: {"learning_rate": 0.1 / (1 + step // 20)}, every_steps=20),
            hooks.GlobalStepWaiter(20),
            hooks.Profiler(every_steps=40, duration_ms=100),
            hooks.Export(),
            hooks.BestCheckpoint(),
            Looks(),
        ],
    )
    trainer.fit(x, y, batch_size=16, steps=80, validation_data=(x, y), validation_every_steps=40, verbose=0)
    for step, rate in seen.items():
        assert rate == pytest.approx(0.1 / (1 + (step - 1) // 20)), step
    assert all(workers == {0} for step, workers in worked.items() if step <= 20)
    assert trainer.result.gradients.by_worker["worker:1"].accepted > 0
    # The chief's trace and those of the three tasks, together.
    sessions = list((tmp_path / "tb" / "train" / "plugins" / "profile").iterdir())
    traced = [{file.name.removesuffix(".xplane.pb") for file in session.iterdir()} for session in sessions]
    assert {"chief", "ps-0", "worker-0", "worker-1"} in traced
    served = keras.layers.TFSMLayer(tmp_path / "saved_model", call_endpoint="serve")
    np.testing.assert_allclose(served(x[:8]), trainer.predict(x[:8]), rtol=1e-5, atol=1e-6)
    assert (tmp_path / "best" / "validation.json").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "parameter_server",
        *(pytest.param(s, marks=pytest.mark.long) for s in ("sync_replicas", "mirrored", "multi_worker_mirrored")),
    ],
)
def test_without_an_end_validations_checkpoints_and_exports_go_on_until_a_hook_ends_training(
    strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster, options = STRATEGIES[strategy]
    hooks = [
        # No value is better than the first.
        kdist.hooks.EarlyStopping(patience=3, min_delta=100.0),
        kdist.hooks.CheckpointSaver(every_steps=20, keep=9),
        kdist.hooks.Export(every_steps=20),
        kdist.hooks.LoggingTensor(every_steps=20),
        # All that there will be.
        kdist.hooks.ProgressiveValidation(window=100_000),
    ]
    trainer = kdist.Trainer(models.mlp, cluster, strategy, run_dir=tmp_path / "run", hooks=hooks, **options)
    history = trainer.fit(toy_batches(), validation_data=toy_data(), validation_every_steps=10).history
    assert (trainer.result.global_step, trainer.result.stopped_by) == (40, "EarlyStopping")
    steps = {int(path.stem.partition("-")[2]) for path in (tmp_path / "run" / "checkpoints").glob("ckpt-*.index")}
    assert steps == {0, 20, 40}
    printed = capfd.readouterr().out
    assert [step for step in (20, 40) if f"save  | step     {step} | run/saved_model" in printed] == [20, 40]
    # Every step and every worker counts once.
    assert history["progressive_accuracy"] == history["accuracy"]
    assert history["progressive_loss"] == pytest.approx(history["loss"])
    assert f"| progressive_accuracy {history['accuracy'][0]:.4f}" in printed


class Diary(kdist.hooks.Hook):
    """Writes down what it sees, in a file that only this process has open, and reads and writes values."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")
        self.process = os.getpid()
        self.steps: list[int] = []
        self.events: list[str] = []
        self.validated: list[Any] = []

    def begin(self, session: Any) -> None:
        self.events.append("begin")

    def after_create_session(self, session: Any) -> None:
        self.events.append("created")
        self.file.write(f"{session.global_step} {os.getpid() == self.process}\n")

    def after_run(self, context: Any, values: Any) -> None:
        self.steps.append(values.global_step)
        assert values.totals.logs["loss"] == pytest.approx(values.totals.loss)
        context.session.summaries.scalars("train", {"diary": 1.0}, values.global_step)
        if values.global_step == 8:
            context.session.write({"learning_rate": 0.0})

    def after_validation(self, session: Any, logs: Any) -> None:
        self.validated.append((session.global_step, sorted(logs), session.learning_rate() == 0.0))

    def due_in(self, step: int) -> int:
        return 8 - step % 8

    def end(self, session: Any) -> None:
        self.events.append("end")
        self.weights = session.read()
        session.print_line("the diary is full")

    def close(self) -> None:
        self.events.append("close")
        self.file.close()


class Keeper(callbacks.Callback):
    """Counts its events; adds to the logs of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.events: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.events.append("train")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.events.append(f"epoch {epoch}")
        logs["process"] = os.getpid()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.events.append(f"test {batch}")

    def on_train_end(self, logs: Any = None) -> None:
        self.events.append("end")


@pytest.mark.parametrize("strategy", in_short(["single", "mirrored"], {"mirrored"}))
def test_hooks_and_callbacks_of_the_user_run_in_the_process_of_the_user(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = toy_data(256)
    options = {"devices": 2} if strategy == "mirrored" else {}
    diary, keeper = Diary(tmp_path / "diary"), Keeper()
    final = kdist.hooks.FinalOps(lambda session: (os.getpid(), session.global_step))
    trainer = kdist.Trainer(models.mlp, "local", strategy, run_dir=tmp_path / "run", hooks=[diary, final], **options)
    history = trainer.fit(
        x,
        y,
        batch_size=8 if strategy == "mirrored" else 16,
        epochs=2,
        validation_data=(x[:64], y[:64]),
        validation_batch_size=32,
        callbacks=[keeper],
    )
    assert (tmp_path / "diary").read_text() == "0 True\n"
    assert any(name.endswith("kernel") for name in diary.weights)
    assert diary.events == ["begin", "created", "end", "close"]
    # Summaries and the log have a first step of their own.
    assert diary.steps[-4:] == [8, 16, 24, 32]
    assert diary.validated == [(16, ["accuracy", "loss"], True), (32, ["accuracy", "loss"], True)]
    assert keeper.events == ["train", *["test 0", "test 1", "epoch 0"], *["test 0", "test 1", "epoch 1"], "end"]
    assert history.history["process"] == [os.getpid()] * 2
    assert final.final_ops_values == (os.getpid(), 32)
    assert "diary" in tags_of(tmp_path / "run" / "tb" / "train")
    assert "the diary is full" in capsys.readouterr().out


class Anneal(callbacks.Callback):
    """Sets a variable to the number of the epoch."""

    def __init__(self, variable: Any) -> None:
        super().__init__()
        self.variable = variable

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.variable.assign(float(epoch))


@pytest.mark.parametrize(
    "strategy",
    [
        "parameter_server",
        *(
            pytest.param(s, marks=pytest.mark.long)
            for s in ("single", "sync_replicas", "mirrored", "multi_worker_mirrored")
        ),
    ],
)
def test_a_variable_that_loss_metric_and_regularizer_read_is_what_a_callback_assigns(
    strategy: str, tmp_path: Path
) -> None:
    beta, x, y = keras.Variable(0.0, trainable=False), np.ones((64, 1), np.float32), np.zeros((64, 1), np.float32)

    def loss(y_true: Any, y_pred: Any) -> Any:
        return beta * keras.ops.mean(y_pred, axis=-1)

    def build() -> keras.Model:
        layer = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", kernel_regularizer=lambda w: beta * keras.ops.sum(w)
        )
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        metric = keras.metrics.MeanMetricWrapper(lambda y_true, y_pred: beta + 0 * y_pred, name="beta")
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=[metric])
        return model

    cluster, options = STRATEGIES.get(strategy, ("local", {}))
    plain, trainer = build(), kdist.Trainer(build, cluster, strategy, run_dir=tmp_path, **options)
    # The loss is linear and the examples are equal, so it does not matter which replica takes which.
    arguments: dict[str, Any] = {"batch_size": 8, "epochs": 3, "steps_per_epoch": 4, "callbacks": [Anneal(beta)]}
    expected = plain.fit(
        tf.data.Dataset.from_tensors((x[:8], y[:8])).repeat(), verbose=0, **arguments | {"batch_size": None}
    )
    found = trainer.fit(x, y, verbose=0, **arguments)
    np.testing.assert_allclose(trainer.model.get_weights()[0], plain.get_weights()[0], rtol=1e-5)
    # An asynchronous worker may compute its loss before the update of another one.
    for name in ["beta", *(["loss"] if strategy != "parameter_server" else [])]:
        np.testing.assert_allclose(found.history[name], expected.history[name], rtol=1e-5)


def test_a_variable_of_tensorflow_that_is_assigned_elsewhere_is_refused(tmp_path: Path) -> None:
    beta, (x, y) = tf.Variable(0.0, name="beta"), toy_data(64)

    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", lambda y_true, y_pred: beta * keras.ops.mean(y_pred, -1))
        return model

    trainer = kdist.Trainer(build, strategy="mirrored", devices=2, run_dir=tmp_path)
    with pytest.raises(kdist.ConfigError, match=r"callbacks: beta:0 is a tf\.Variable.*assigned it.*keras\.Variable"):
        trainer.fit(x, y, batch_size=8, epochs=3, callbacks=[Anneal(beta)], verbose=0)
