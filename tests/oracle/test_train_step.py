"""Models with a `train_step` of their own, against plain Keras, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import toy_data
from keras import layers, ops
from test_keras_parity import BATCH, STEPS, assert_same_as_keras

import kdist


def dense(*sizes: int, seed: int = 1) -> keras.Sequential:
    start = keras.initializers.GlorotUniform(seed)
    hidden = [layers.Dense(size, activation="relu", kernel_initializer=start) for size in sizes[:-1]]
    return keras.Sequential([*hidden, layers.Dense(sizes[-1], kernel_initializer=start)])


class Plain(keras.Model):
    """The step that Keras itself takes, written out, as in its guide; the state of normalization changes, too."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before the normalization has no gradient but noise.
        self.net = layers.Dense(8, use_bias=False, kernel_initializer=keras.initializers.GlorotUniform(6))
        self.norm = layers.BatchNormalization()
        self.out = dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.norm(self.net(inputs), training=training))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Wrapped(keras.Sequential):
    """Adds a value to what Keras's step returns, and reads weights inside a loop."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "batch": ops.shape(data[1])[0]}


class Distiller(keras.Model):
    """A student learns from a teacher, and a copy of it follows by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.follower = dense(8, 3), dense(16, 3, seed=2), dense(8, 3)
        self.gap = keras.metrics.Mean(name="gap")

    def call(self, inputs: Any) -> Any:
        return self.student(inputs)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.gap]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        wanted = ops.softmax(self.teacher(x))
        self.follower(x)
        with tf.GradientTape() as tape:
            gap = ops.mean(ops.categorical_crossentropy(wanted, self.student(x), from_logits=True))
        weights = self.student.trainable_weights
        gradients = tape.gradient(gap, weights)
        for slow, fast in zip(self.follower.weights, weights):
            slow.assign(0.9 * slow + 0.1 * fast)
        self.optimizer.apply(gradients, weights)
        self.gap.update_state(gap, sample_weight=ops.shape(x)[0])
        return {"gap": self.gap.result()}


class Forecast(keras.Model):
    """Weights are read inside a loop; gradients are clipped by hand; inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = layers.LSTM(4, kernel_initializer=keras.initializers.GlorotUniform(4)), dense(6)

    def call(self, inputs: Any) -> Any:
        return self.out(self.rnn(inputs))

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x[:, :-1]) - x[:, -1]) ** 2)
            loss += tf.cond(loss > 0.1, lambda: 0.01 * ops.sum(self.out.weights[0] ** 2), lambda: 0.0)
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients = [ops.clip(gradient, -0.05, 0.05) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


class Plans(keras.Model):
    """Shows the learning rate, and adds a loss every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(8, 3)
        self.rates, self.steps = keras.metrics.Mean(name="rate"), keras.metrics.Sum(name="steps")

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.rates, self.steps]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
            third = ops.cast(ops.equal(self.optimizer.iterations % 3, 0), "float32")
            loss += third * ops.sum(self.net.weights[0] ** 2)
        self.rates.update_state(self.optimizer.learning_rate)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.steps.update_state(self.optimizer.iterations)
        return {"rate": self.rates.result(), "steps": self.steps.result()}


def scheduled() -> keras.Model:
    model = Plans()
    model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)), SPARSE)
    return model


class TwoOptimizers(keras.Model):
    """Adversarial: each network learns from what the other one has become, with an optimizer of its own.

    Args:
        clip: assigns the weights of the first after each update, as a Wasserstein GAN of the first kind.
        normalize: divides them by their spectral norm whenever they are used.
    """

    def __init__(self, *, clip: bool = False, normalize: bool = False) -> None:
        super().__init__()
        self.critic, self.actor = dense(8, 1), dense(8, 6, seed=2)
        if normalize:
            keras.utils.set_random_seed(4)
            self.critic = keras.Sequential(
                [layers.Input((6,)), layers.SpectralNormalization(dense(8).layers[0]), dense(1)]
            )
        self.clip = clip
        self.critic_optimizer = keras.optimizers.Adagrad(0.1, clipnorm=0.2)
        self.actor_optimizer = keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9
        )
        self.critic_loss, self.actor_loss = keras.metrics.Mean(name="critic"), keras.metrics.Mean(name="actor")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.critic_loss, self.actor_loss]

    def train_step(self, x: Any) -> dict[str, Any]:
        for scale in (1.0, 0.5):
            with tf.GradientTape() as tape:
                made = self.critic(self.actor(x * scale), training=True)
                loss = ops.mean(made) - ops.mean(self.critic(x, training=True)) + ops.mean(made**2)
            gradients = tape.gradient(loss, self.critic.trainable_weights)
            self.critic_optimizer.apply_gradients(zip(gradients, self.critic.trainable_weights))
            for weight in self.critic.trainable_weights if self.clip else []:
                weight.assign(ops.clip(weight, -0.4, 0.4))
            self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.actor(x), training=True))
        gradients = tape.gradient(loss, self.actor.trainable_weights)
        self.actor_optimizer.apply(gradients, self.actor.trainable_weights)
        self.actor_loss.update_state(loss)
        return {"critic": self.critic_loss.result(), "actor": self.actor_loss.result()}


def adversarial(**arguments: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = TwoOptimizers(**arguments)
        # For Keras alone: TensorFlow's dependency optimizer drops edges between the updates and the reads of a
        # variable, so that its compiled step differs between runs, with spectral norms between any two.
        model.compile(run_eagerly=True)
        return model

    return build


def spectrally_normalized() -> keras.Model:
    keras.utils.set_random_seed(4)
    model = keras.Sequential([layers.Input((6,)), layers.SpectralNormalization(dense(8).layers[0]), dense(3)])
    model.compile(keras.optimizers.Adam(0.02), SPARSE, metrics=["accuracy"])
    return model


def compiled(make: Callable[[], keras.Model], **arguments: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = make()
        model.compile(keras.optimizers.Adam(0.02), **arguments)
        return model

    return build


def wrapped() -> keras.Model:
    return Wrapped([layers.Input((6,)), dense(8, 3)])


SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sequences() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(BATCH * STEPS, 5, 6)).astype(np.float32)


class Steps(keras.Model):
    """A step that `body` completes: `body(model, x, y, gradients)` -> what it returns."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.other = dense(8, 3), keras.optimizers.SGD()
        self.body = body

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        return self.body(self, loss, tape.gradient(loss, self.trainable_weights))


def applied(model: Any, loss: Any, gradients: Any) -> dict[str, Any]:
    model.optimizer.apply(gradients, model.trainable_weights)
    return {"loss": loss}


def apply_twice(model: Any, loss: Any, gradients: Any) -> Any:
    applied(model, loss, gradients)
    return {"value": applied(model, loss, gradients)["loss"]}


def apply_with_another(model: Any, loss: Any, gradients: Any) -> Any:
    model.other.apply(gradients, model.trainable_weights)
    return {"value": loss}


def read_after_apply(model: Any, loss: Any, gradients: Any) -> Any:
    return {**applied(model, loss, gradients), "norm": ops.sum(model.trainable_weights[0] ** 2)}


CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], tuple[Any, Any]]]] = {
    "written out": (compiled(Plain, loss=SPARSE, metrics=[]), lambda: toy_data(BATCH * STEPS)),
    "wrapped": (
        compiled(wrapped, loss=SPARSE, metrics=["accuracy"]),
        # Every batch is whole: Keras shows the value of the last one.
        lambda: toy_data(BATCH * STEPS),
    ),
    "distillation": (compiled(Distiller), lambda: toy_data(BATCH * STEPS)),
    "optimizer read": (compiled(Plans, loss=SPARSE), lambda: toy_data(BATCH * STEPS)),
    "optimizer read with a schedule": (scheduled, lambda: toy_data(BATCH * STEPS)),
    "two optimizers": (adversarial(), lambda: (toy_data(BATCH * STEPS)[0], None)),
    "weights clipped after each update": (adversarial(clip=True), lambda: (toy_data(BATCH * STEPS)[0], None)),
    "two optimizers and spectral norms": (adversarial(normalize=True), lambda: (toy_data(BATCH * STEPS)[0], None)),
    "spectral norms with Keras's own step": (spectrally_normalized, lambda: toy_data(BATCH * STEPS)),
    "two updates of the same weights": (compiled(lambda: Steps(apply_twice), loss=SPARSE), lambda: toy_data(BATCH)),
    "another optimizer": (compiled(lambda: Steps(apply_with_another), loss=SPARSE), lambda: toy_data(BATCH)),
    "weights read after their update": (
        compiled(lambda: Steps(read_after_apply), loss=SPARSE),
        lambda: toy_data(BATCH),
    ),
    "inputs alone": (compiled(Forecast), lambda: (sequences(), None)),
}


#: The others run in `make long`.
IN_SHORT = {"two updates of the same weights"}


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        *[pytest.param(n, "local", marks=pytest.mark.long) for n in CASES],
        *[
            pytest.param(n, "2ps1w", marks=[pytest.mark.cluster] + [pytest.mark.long] * (n not in IN_SHORT))
            for n in CASES
        ],
    ],
)
@pytest.mark.usefixtures("tasks_prepared")
def test_it_is_as_in_keras(name: str, cluster: str, run_dir: Path) -> None:
    build, data = CASES[name]
    # The global step counts steps; Keras counts the updates by the optimizer, if it makes any.
    several = [kind for kind in ("two", "clipped", "another") if kind in name]
    assert_same_as_keras(build, *data(), run_dir, cluster, epochs=2, compare_iterations=not several)


def test_a_step_prints_weights_after_their_update(run_dir: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed"

    def body(model: Any, loss: Any, gradients: Any) -> Any:
        logs = applied(model, loss, gradients)
        tf.print(model.trainable_weights[0][0, 0], output_stream=f"file://{printed}")
        return logs

    trainer = kdist.Trainer(compiled(lambda: Steps(body), loss=SPARSE), run_dir=run_dir)
    trainer.fit(*toy_data(BATCH), batch_size=BATCH, verbose=0)
    assert float(printed.read_text()) == pytest.approx(float(trainer.model.trainable_weights[0][0, 0]), rel=1e-4)


@pytest.mark.parametrize(("clip", "pushes"), [(False, 2), (True, 4)])
def test_a_plan_counts_what_every_phase_of_a_step_moves(clip: bool, pushes: int, run_dir: Path) -> None:
    trainer = kdist.Trainer(adversarial(clip=clip), "1ps1w", "parameter_server", run_dir=run_dir)
    plan = trainer.plan(np.ones((8, 6), np.float32), batch_size=4)
    # The critic is read by its second update and by that of the actor as the one before has left it.
    critic, actor = plan.variables[:4], plan.variables[4:]
    assert {(v.num_pulls, v.num_pushes) for v in critic} == {(3, pushes)}
    assert {(v.num_pulls, v.num_pushes) for v in actor} == {(1, 1)}


def read_a_slot(model: Any, loss: Any, gradients: Any) -> Any:
    model.optimizer.build(model.trainable_variables)
    return {**applied(model, loss, gradients), "slot": ops.sum(model.optimizer.variables[-1])}


def apply_in_a_branch(model: Any, loss: Any, gradients: Any) -> Any:
    tf.cond(loss > 1, lambda: applied(model, loss, gradients)["loss"], lambda: loss)
    return {"loss": loss}


def apply_nothing(model: Any, loss: Any, gradients: Any) -> Any:
    return {"loss": loss}


def return_the_loss(model: Any, loss: Any, gradients: Any) -> Any:
    return applied(model, loss, gradients)["loss"]


REFUSED: dict[Callable[..., Any], str] = {
    apply_in_a_branch: "applies gradients inside tf.cond, a loop, or a function of its own",
    apply_nothing: "applies no gradients",
    read_a_slot: "uses .* of its optimizers, which other tasks do not have",
    return_the_loss: "returns SymbolicTensor; return a dict",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_no_worker_could_do_is_refused_before_anything_starts(body: Callable[..., Any], run_dir: Path) -> None:
    trainer = kdist.Trainer(compiled(lambda: Steps(body), loss=SPARSE), cluster="2ps2w", run_dir=run_dir)
    with pytest.raises(kdist.ConfigError, match=REFUSED[body]) as refused:
        trainer.fit(*toy_data(BATCH), steps=1, verbose=0)
    assert not (run_dir / "logs").exists()
    assert f"{__file__}:" in str(refused.value)


def test_values_that_no_metric_counts_are_means_of_the_examples(run_dir: Path) -> None:
    """Keras shows those of the last batch."""
    data = tf.data.Dataset.from_tensor_slices(toy_data(3 * BATCH + 4)).batch(BATCH)
    history = kdist.Trainer(CASES["wrapped"][0], run_dir=run_dir).fit(data, epochs=1, verbose=0)
    assert history.history["batch"] == [pytest.approx((3 * BATCH**2 + 4**2) / (3 * BATCH + 4))]


def test_a_loss_that_no_metric_counts_is_its_mean_and_not_0(run_dir: Path) -> None:
    """In Keras the tracker of the loss, which nobody updates, hides it."""
    build = compiled(lambda: Steps(applied), loss=SPARSE)
    x, y = toy_data(BATCH)
    history = kdist.Trainer(build, run_dir=run_dir).fit(x, y, batch_size=BATCH, steps=1, verbose=0)
    assert history.history["loss"] == [pytest.approx(build().evaluate(x, y, verbose=0), rel=1e-5)]


class Summing(keras.Model):
    """Counts a loss that is a sum over the examples, and one that is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(1)
        self.total, self.average = keras.metrics.Mean(name="total"), keras.metrics.Mean(name="average")

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            errors = (self(x, training=True) - y) ** 2
            loss = tf.reduce_sum(errors)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.total.update_state(loss)
        self.average.update_state(errors)
        # As Keras's guide writes it; `metrics` begins with the tracker of the loss.
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def test_a_sum_that_a_step_counts_is_that_of_all_synchronous_replicas(run_dir: Path) -> None:
    build = compiled(Summing)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    expected = build().fit(data.batch(8), epochs=2, verbose=0).history
    trainer = kdist.Trainer(build, run_dir=run_dir, strategy="mirrored", devices=2)
    found = trainer.fit(data.batch(4), epochs=2, verbose=0).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)
