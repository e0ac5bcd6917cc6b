"""Code that users write around a model, as Keras's own documentation shows it: metrics, schedules, optimizers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import keras
import models
import numpy as np
import pytest
from helpers import environment, in_short, toy_data
from keras import ops
from test_keras_parity import BATCH, STEPS, assert_same_as_keras

import kdist


class TruePositives(keras.metrics.Metric):
    """The result is the variable itself, as in the example of Keras's documentation."""

    def __init__(self, name: str = "true_positives", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        chosen = ops.equal(ops.cast(ops.argmax(y_pred, -1), "int64"), ops.cast(ops.reshape(y_true, [-1]), "int64"))
        self.count.assign_add(ops.sum(ops.cast(chosen, "float32")))

    def result(self) -> Any:
        return self.count


class Counts(TruePositives):
    """The result is a dict."""

    def result(self) -> Any:
        return {"hits": self.count, "half": self.count / 2}


class Kept(keras.metrics.Metric):
    """Keeps something else than a sum of the scores of batches."""

    first = 0.0

    def __init__(self, name: str = "kept", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        start = keras.initializers.Constant(self.first)
        self.kept = self.add_variable(shape=(), initializer=start, name="kept")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.kept.assign(self.keep(self.kept.value, ops.mean(ops.max(y_pred, -1))))

    def keep(self, kept: Any, score: Any) -> Any:
        return 0.9 * kept + 0.1 * score

    def result(self) -> Any:
        return self.kept


class Best(Kept):
    merge_rule = "max"

    def keep(self, kept: Any, score: Any) -> Any:
        return ops.maximum(kept, score)


class Last(Kept):
    merge_rule: ClassVar = {"kept": "last"}

    def keep(self, kept: Any, score: Any) -> Any:
        return score


class Product(Kept):
    merge_rule = "product"
    first = 1.0

    def keep(self, kept: Any, score: Any) -> Any:
        return kept * score

    def reset_state(self) -> None:
        self.kept.assign(1.0)


class MergesItself(keras.metrics.Metric):
    """The variance of the scores of examples; means and sums of squares do not add up (Chan et al., 1979)."""

    def __init__(self, name: str = "variance", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.count, self.mean, self.squares = (
            self.add_variable(shape=(), initializer="zeros", name=name) for name in ("count", "mean", "squares")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        scores = ops.max(y_pred, -1)
        self._add(ops.cast(ops.size(scores), "float32"), ops.mean(scores), ops.sum((scores - ops.mean(scores)) ** 2))

    def merge_state(self, metrics: list[MergesItself]) -> None:
        for metric in metrics:
            self._add(metric.count.value, metric.mean.value, metric.squares.value)

    def result(self) -> Any:
        return self.squares / ops.maximum(self.count, 1.0)

    def _add(self, count: Any, mean: Any, squares: Any) -> None:
        total, shift = ops.maximum(self.count + count, 1.0), mean - self.mean
        self.squares.assign(self.squares + squares + shift**2 * self.count * count / total)
        self.mean.assign(self.mean + shift * count / total)
        self.count.assign(self.count + count)


class Wrong(Best):
    merge_rule = "maximum"


def one_hot_data() -> tuple[np.ndarray, np.ndarray]:
    x, y = toy_data(BATCH * STEPS)
    return x, np.eye(3, dtype=np.float32)[np.reshape(y, [-1])]


def no_loss_metric(optimizer: Any = "adam") -> keras.Model:
    """Overrides `metrics` without the tracker of the loss."""

    class OwnMetrics(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3, activation="softmax")
            self.mean_score = keras.metrics.Mean(name="mean_score")

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
            self.mean_score.update_state(ops.max(y_pred, -1))
            return self.get_metrics_result()

        @property
        def metrics(self) -> list[keras.metrics.Metric]:
            return [self.mean_score]

    model = OwnMetrics()
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def connectionist() -> keras.Model:
    start = keras.initializers.GlorotUniform(3)
    dense = keras.layers.Dense(6, activation="softmax", kernel_initializer=start)
    model = keras.Sequential([keras.layers.Input((12, 4)), dense])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.CTC())
    return model


def spoken() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.random((BATCH * STEPS, 12, 4), np.float32)
    return x, rng.integers(1, 5, (BATCH * STEPS, 3)).astype(np.int32)


def more_than_metrics() -> keras.Model:
    """`compute_metrics` returns a value of its own: the same for every batch, since Keras shows the last one."""

    class Sized(keras.Sequential):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "size": ops.shape(y_pred)[0]}

    start = keras.initializers.GlorotUniform(3)
    model = Sized([keras.layers.Input((6,)), keras.layers.Dense(3, "softmax", kernel_initializer=start)])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], tuple[Any, Any]]]] = {
    "a metric whose result is its variable": (
        lambda: models.mlp(metrics=[TruePositives()]),
        lambda: toy_data(BATCH * STEPS),
    ),
    "a metric whose result is a dict": (lambda: models.mlp(metrics=[Counts()]), lambda: toy_data(BATCH * STEPS)),
    "metrics that are not sums": (
        lambda: models.mlp(metrics=[Best("best"), Last("last"), Product("product")]),
        lambda: toy_data(BATCH * STEPS),
    ),
    "a metric that merges its states itself": (
        lambda: models.mlp(metrics=[MergesItself(), "accuracy"]),
        lambda: toy_data(BATCH * STEPS),
    ),
    "metrics with several values": (
        lambda: models.mlp(
            loss="categorical_crossentropy",
            metrics=[keras.metrics.F1Score(), keras.metrics.Recall(thresholds=[0.2, 0.5], name="recall")],
        ),
        one_hot_data,
    ),
    "compute_metrics returns more": (more_than_metrics, lambda: toy_data(BATCH * STEPS)),
    "compiled with XLA": (lambda: models.mlp("adam", jit_compile=True), lambda: toy_data(BATCH * STEPS)),
    # Its loop consists of functions of TF1's kind.
    "connectionist temporal classification": (connectionist, spoken),
    "loss_scale_factor": (
        lambda: models.mlp(keras.optimizers.SGD(0.1, loss_scale_factor=64.0, clipnorm=0.1)),
        lambda: toy_data(BATCH * STEPS),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", in_short(CASES, {"compiled with XLA"}))
def test_it_is_as_in_keras(name: str, run_dir: Path) -> None:
    build, data = CASES[name]
    assert_same_as_keras(build, *data(), run_dir, "local", epochs=2)


@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
@pytest.mark.parametrize("name", in_short(CASES, {"metrics with several values"}))
def test_it_is_as_in_keras_on_servers(name: str, run_dir: Path) -> None:
    build, data = CASES[name]
    assert_same_as_keras(build, *data(), run_dir, "2ps1w", epochs=2)


def test_metrics_with_several_values_are_written_as_such(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build, _ = CASES["metrics with several values"]
    x, y = one_hot_data()
    trainer = kdist.Trainer(build, run_dir=run_dir)
    history = trainer.fit(x, y, batch_size=BATCH, steps=STEPS, validation_data=(x, y), verbose=2).history
    expected = trainer.model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    found = json.loads((run_dir / "result.json").read_text())["metrics"]["validation"]
    np.testing.assert_allclose(found["f1_score"], expected["f1_score"], rtol=1e-5)
    np.testing.assert_allclose(trainer.evaluate(x, y, return_dict=True)["f1_score"], expected["f1_score"], rtol=1e-5)
    np.testing.assert_allclose(history["val_f1_score"][0], expected["f1_score"], rtol=1e-5)
    assert isinstance(history["val_f1_score"][0], np.ndarray)
    # Read from `metrics.csv`: nothing is left to do.
    again = kdist.Trainer(build, run_dir=run_dir).fit(x, y, batch_size=BATCH, steps=STEPS, verbose=0).history
    np.testing.assert_array_equal(again["f1_score"], history["f1_score"])
    assert again["f1_score"][0].dtype == history["f1_score"][0].dtype
    shown = " ".join(f"{value:.4f}" for value in expected["f1_score"])
    assert f"f1_score [{shown}]" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("tasks_prepared")
def test_workers_that_validate_merge_states(run_dir: Path) -> None:
    x, y = toy_data()
    trainer = kdist.Trainer(
        lambda: models.mlp(metrics=[MergesItself()]), cluster="1ps2w", strategy="sync_replicas", run_dir=run_dir
    )
    history = trainer.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0).history
    expected = trainer.model.evaluate(x, y, verbose=0, return_dict=True)["variance"]
    assert history["val_variance"][-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (Kept, "metric kept: Kept does not add up: .* give the class a merge_rule, one of sum, mean, max"),
        (Wrong, "metric kept: merge_rule='maximum': must be one of sum, mean, max"),
    ],
)
def test_a_metric_that_cannot_be_merged_is_refused_by_name(metric: Any, message: str, run_dir: Path) -> None:
    trainer = kdist.Trainer(lambda: models.mlp(metrics=["accuracy", metric()]), cluster="2ps2w", run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=message):
        trainer.fit(*toy_data(BATCH), steps=2, verbose=0)


def test_a_metric_with_several_values_cannot_be_the_best(run_dir: Path) -> None:
    build, _ = CASES["metrics with several values"]
    trainer = kdist.Trainer(build, run_dir=run_dir, hooks=[kdist.hooks.BestCheckpoint(metric="f1_score", mode="max")])
    with pytest.raises(kdist.ConfigError, match=r"BestCheckpoint\.metric=f1_score: has 3 values"):
        trainer.fit(*one_hot_data(), steps=2, validation_data=one_hot_data(), verbose=0)


def test_the_loss_is_reported_if_metrics_leaves_it_out(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    trainer = kdist.Trainer(no_loss_metric, run_dir=run_dir)
    history = trainer.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert set(history.history) == {"loss", "mean_score"}
    assert history.history["loss"][1] < history.history["loss"][0]


class CountsWhenEvaluated(keras.Sequential):
    """`compute_metrics` leaves a metric out in training, in which nothing counts it."""

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.seen = keras.metrics.Mean(name="seen")
        self.is_training = False

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.is_training = training
        return super().call(inputs, training=training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        if not self.is_training:
            self.seen.update_state(ops.max(y_pred, -1))
            return self.get_metrics_result()
        return {name: result for name, result in self.get_metrics_result().items() if name != "seen"}


def test_a_metric_that_compute_metrics_leaves_out_is_not_reported(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> keras.Model:
        model = CountsWhenEvaluated([keras.layers.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    x, y = toy_data(BATCH * STEPS)
    trainer = kdist.Trainer(build, run_dir=run_dir)
    history = trainer.fit(x, y, batch_size=BATCH, validation_data=(x, y), verbose=2)
    assert set(history.history) == {"loss", "val_loss", "val_seen"}
    assert set(trainer.result.metrics["train"]) == {"loss"}
    assert "seen" not in (run_dir / "metrics.csv").read_text().splitlines()[0].split(",")
    assert not re.search(r"train .*seen", capsys.readouterr().out)


class Halves(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a config."""

    def __init__(self, first: float, every: int) -> None:
        self.first, self.every = first, every

    def __call__(self, step: Any) -> Any:
        return self.first * 0.5 ** ops.cast(step // self.every, "float32")


class Signed(keras.optimizers.Optimizer):
    """An optimizer without `get_config`, with an argument and a slot of its own."""

    def __init__(self, learning_rate: float, keep: float) -> None:
        super().__init__(learning_rate)
        self.keep = keep

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            self.means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        mean = self.means[self._get_variable_index(variable)]
        self.assign(mean, self.keep * mean + (1 - self.keep) * gradient)
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(mean))


RATES: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "a schedule without a config": lambda: keras.optimizers.Adam(Halves(0.02, 4)),
    "an optimizer without a config": lambda: Signed(0.01, keep=0.8),
}


@pytest.mark.parametrize(
    "cluster",
    ["local", pytest.param("2ps1w", marks=[pytest.mark.cluster, pytest.mark.long])],
)
@pytest.mark.parametrize("name", in_short(RATES, {"an optimizer without a config"}))
@pytest.mark.usefixtures("tasks_prepared")
def test_optimizers_and_schedules_need_no_config(name: str, cluster: str, run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    assert_same_as_keras(lambda: models.mlp(RATES[name]()), x, y, run_dir, cluster, epochs=2)


def test_a_callable_learning_rate_needs_no_config(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    rate = 0.05
    assert_same_as_keras(lambda: models.mlp(keras.optimizers.SGD(lambda: rate)), x, y, run_dir, "local", epochs=2)


def test_an_optimizer_that_creates_slots_elsewhere_is_refused(run_dir: Path) -> None:
    class Early(keras.optimizers.SGD):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.calls = self.add_variable((), name="calls")

    x, y = toy_data(BATCH)
    with pytest.raises(kdist.ConfigError, match="optimizer Early cannot be copied to the servers: it creates calls "):
        kdist.Trainer(lambda: models.mlp(Early()), run_dir=run_dir).fit(x, y, steps=1, verbose=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_clipnorm": 1.0}, "global_clipnorm needs the mean of all gradients, which no server has"),
        ({"use_ema": True, "ema_overwrite_frequency": 4}, "ema_overwrite_frequency do not go together"),
    ],
)
def test_gradient_accumulation_refuses_what_no_server_can_do(
    options: dict[str, Any], message: str, run_dir: Path
) -> None:
    def build() -> keras.Model:
        return models.mlp(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, **options))

    with pytest.raises(kdist.ConfigError, match=message):
        kdist.Trainer(build, cluster="2ps1w", run_dir=run_dir).fit(*toy_data(BATCH), steps=2, verbose=0)
    assert not (run_dir / "logs").exists()


class FreezesAfterTheFirstEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[0].trainable = False


@pytest.mark.parametrize(
    "cluster",
    ["local", pytest.param("2ps1w", marks=[pytest.mark.cluster, pytest.mark.long])],
)
@pytest.mark.usefixtures("tasks_prepared")
def test_a_layer_that_a_callback_freezes_is_trained_as_by_keras(cluster: str, run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    callbacks = [FreezesAfterTheFirstEpoch()]
    assert_same_as_keras(lambda: models.mlp("adam"), x, y, run_dir, cluster, epochs=3, callbacks=callbacks)


@pytest.mark.long
def test_a_loaded_model_begins_with_the_first_batch(run_dir: Path, tmp_path: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    before = models.mlp("sgd")
    before.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    before.save(tmp_path / "before.keras")
    assert_same_as_keras(
        lambda: keras.saving.load_model(tmp_path / "before.keras"), x[: 5 * BATCH], y[: 5 * BATCH], run_dir, "local"
    )


def test_a_fit_that_would_train_nothing_is_refused(run_dir: Path, tmp_path: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    before = models.mlp("sgd")
    before.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    before.save(tmp_path / "before.keras")
    trainer = kdist.Trainer(lambda: keras.saving.load_model(tmp_path / "before.keras"), run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=r"steps=12: the model has had 12 updates; steps is the global step"):
        trainer.fit(x, y, steps=STEPS, verbose=0)


class Seen(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.begun = dict(self.params)


def test_one_callback_needs_no_list_and_knows_the_steps_of_an_epoch(run_dir: Path) -> None:
    x, y = toy_data(BATCH * STEPS)
    ours, theirs = Seen(), Seen()
    models.mlp("sgd").fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=theirs)
    trainer = kdist.Trainer(lambda: models.mlp("sgd"), run_dir=run_dir, callbacks=Seen())
    trainer.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=ours)
    assert ours.begun == theirs.begun == {"verbose": 0, "epochs": 2, "steps": STEPS}


@pytest.mark.parametrize("wrong", [1, [1], keras.callbacks.EarlyStopping])
def test_what_is_no_callback_is_refused(wrong: Any, run_dir: Path) -> None:
    with pytest.raises(kdist.ConfigError, match="is no keras.callbacks.Callback"):
        kdist.Trainer(lambda: models.mlp("sgd"), run_dir=run_dir).fit(*toy_data(BATCH), steps=1, callbacks=wrong)


def test_a_model_is_built_as_it_is_trained(run_dir: Path) -> None:
    """Without `training`, RandomCrop resizes to the size of its crops, and images of unknown size cannot be."""

    def build() -> keras.Model:
        images = keras.Input((8, 8, 1))
        crop = keras.layers.RandomCrop(4, 4, seed=1)
        model = keras.Sequential([images, crop, keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    x, y = np.ones((BATCH * 2, 8, 8, 1), np.float32), np.ones((BATCH * 2, 2), np.float32)
    assert_same_as_keras(build, x, y, run_dir, "local")


SCRIPT = """
import keras
import numpy as np
from keras import ops

import kdist


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return inputs * self.factor


class Hits(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.equal(ops.argmax(y_pred, -1), ops.cast(ops.reshape(y_true, [-1]), "int64")))


def own_loss(y_true, y_pred):
    return ops.sparse_categorical_crossentropy(y_true, y_pred)


FACTOR = 2.0
last = keras.layers.Lambda(lambda x: {last})
model = keras.Sequential([keras.layers.Input((6,)), Scale(), keras.layers.Dense(3, activation="softmax"), last])
model.compile("sgd", own_loss, metrics=[Hits(name="hits")])
x = np.random.default_rng(1).normal(size=(64, 6)).astype("float32")
trainer = kdist.Trainer(model, cluster="2w", run_dir="D")
history = trainer.fit(x, (x.sum(1) > 0).astype("int64"), batch_size=16, epochs=2, verbose=0)
print(trainer.result.global_step, sorted(history.history), type(trainer.model.layers[0]).__name__)
"""


def _run_script(folder: Path, last: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT.replace("{last}", last))
    command, env = [sys.executable, "script.py"], environment()
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("last", ["x / 1", "x / FACTOR"])
def test_a_model_with_classes_and_lambdas_of_a_script_reaches_the_processes_that_train(
    last: str, tmp_path: Path
) -> None:
    done = _run_script(tmp_path, last)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4 ['hits', 'loss'] Scale"
