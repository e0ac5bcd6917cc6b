"""A run that goes on: with new data, for more epochs, with other batches, or from the values of another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import toy_data

import kdist
from kdist.errors import ConfigError
from kdist.hooks import Hook

DAY_1, DAY_2 = toy_data(40), toy_data(60)
SIZES = {"batch_size": 10, "verbose": 0}


class Steps(Hook):
    """Notes the steps that were trained; stops at one, if that is given."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.seen: list[int] = []
        self._stop_at = stop_at

    def due_in(self, step: int) -> int | None:
        return None if self._stop_at is None else max(1, self._stop_at - step)

    def after_run(self, context: Any, values: Any) -> None:
        self.seen += range(values.global_step - values.num_steps, values.global_step)
        if values.global_step == self._stop_at:
            context.session.request_stop("Steps")


def train(run_dir: Path, data: Any, *, stop_at: int | None = None, **arguments: Any) -> tuple[Any, list[int]]:
    """One fit in a process of its own, as far as the trainer knows: its trainer, and the steps that it trained."""
    steps = Steps(stop_at)
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=[steps], seed=1)
    trainer.history = trainer.fit(*data, **{**SIZES, **arguments})
    return trainer, steps.seen


def test_more_epochs_train_the_new_data_from_its_beginning(tmp_path: Path) -> None:
    train(tmp_path, DAY_1)
    trainer, steps = train(tmp_path, DAY_2, more_epochs=1)
    assert steps == list(range(4, 10))
    assert trainer.history.epoch == [0, 1]
    assert trainer.result.stopped_by == "epochs" or trainer.result.global_step == 10
    _, steps = train(tmp_path, DAY_2, more_epochs=2)
    assert steps == list(range(10, 22))


def test_more_epochs_have_other_batches(tmp_path: Path) -> None:
    train(tmp_path, DAY_1)
    _, steps = train(tmp_path, DAY_2, more_epochs=1, batch_size=20)
    assert steps == [4, 5, 6]


def test_more_steps_count_from_where_the_run_is(tmp_path: Path) -> None:
    train(tmp_path, DAY_1)
    _, steps = train(tmp_path, DAY_2, more_steps=5)
    assert steps == list(range(4, 9))


def test_without_a_run_they_are_epochs_and_steps(tmp_path: Path) -> None:
    assert train(tmp_path / "a", DAY_1, more_epochs=2)[1] == list(range(8))
    assert train(tmp_path / "b", DAY_1, more_steps=3)[1] == list(range(3))


def test_a_fit_that_was_stopped_goes_on_to_its_own_end(tmp_path: Path) -> None:
    train(tmp_path, DAY_1)
    assert train(tmp_path, DAY_2, more_epochs=2, stop_at=7)[1] == [4, 5, 6]
    assert train(tmp_path, DAY_2, more_epochs=2)[1] == list(range(7, 16))
    assert train(tmp_path, DAY_2, more_steps=4, stop_at=18)[1] == [16, 17]
    assert train(tmp_path, DAY_2, more_steps=4)[1] == [18, 19]
    # Another number is another wish.
    assert train(tmp_path, DAY_2, more_epochs=2, stop_at=22)[1] == [20, 21]
    assert len(train(tmp_path, DAY_2, more_epochs=1)[1]) == 6


def test_more_epochs_of_data_of_unknown_length(tmp_path: Path) -> None:
    def of(data: Any) -> Any:
        return (tf.data.Dataset.from_tensor_slices(data).filter(lambda x, y: True).batch(10),)

    train(tmp_path, of(DAY_1))
    assert train(tmp_path, of(DAY_2), more_epochs=1)[1] == list(range(4, 10))
    assert train(tmp_path, of(DAY_2), more_epochs=2, stop_at=13)[1] == [10, 11, 12]
    assert train(tmp_path, of(DAY_2), more_epochs=2)[1] == list(range(13, 22))


def test_each_example_of_the_new_data_is_read_once(tmp_path: Path) -> None:
    """Of arrays that tell where they come from."""
    read: list[float] = []

    def build() -> keras.Model:
        inputs = keras.layers.Input((1,))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))

        def loss(y_true: Any, y_pred: Any) -> Any:
            tf.py_function(lambda y: read.extend(y.numpy().ravel().tolist()), [y_true], [])
            return keras.losses.mean_squared_error(y_true, y_pred)

        model.compile("sgd", loss)
        return model

    for first, batch_size in ((0, 7), (100, 5)):
        numbers = np.arange(first, first + 30, dtype="float32")[:, None]
        read.clear()
        kdist.Trainer(build, run_dir=tmp_path, seed=1).fit(
            numbers / 100, numbers, batch_size=batch_size, more_epochs=1, verbose=0
        )
        assert sorted(number for number in read if number >= first) == numbers.ravel().tolist()


@pytest.mark.parametrize("batch_size", [5, 20])
def test_other_batches_finish_the_epochs_that_are_left(batch_size: int, tmp_path: Path) -> None:
    """Two and a half of four epochs are done, in batches of 10; the rest is as much data, in others."""
    train(tmp_path, DAY_1, epochs=4, stop_at=10)
    trainer, steps = train(tmp_path, DAY_1, epochs=4, batch_size=batch_size)
    assert len(steps) == 1.5 * 40 / batch_size
    assert trainer.history.epoch == [0, 1, 2, 3]


def test_other_data_on_a_finished_run_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    train(tmp_path, DAY_1)
    assert train(tmp_path, DAY_1)[1] == []
    with pytest.raises(ConfigError, match=r"on other data \(40 examples.*\n.*more_epochs=1.*\n.*run.start_from="):
        train(tmp_path, DAY_2)
    # The same examples in other batches are the same data.
    assert train(tmp_path, DAY_1, batch_size=8)[1] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"more_epochs": 0}, "train.more_epochs=0"), ({"more_epochs": 1, "more_steps": 1}, "give either")],
)
def test_what_is_not_allowed(arguments: Mapping[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, DAY_1, **arguments)


def weights_after(run_dir: Path, source: Any, build: Any = models.mlp) -> list[np.ndarray]:
    """The weights with which a run begins, as its first checkpoint has them."""
    kdist.Trainer(build, run_dir=run_dir, seed=5, start_from=source).fit(*DAY_2, steps=1, **SIZES)
    reader = tf.train.load_checkpoint(str(run_dir / "checkpoints" / "ckpt-0"))
    names = [name for name in sorted(reader.get_variable_to_shape_map()) if name.startswith("parameters/")]
    assert reader.get_tensor("global_step") == 0
    return [reader.get_tensor(name) for name in names]


def test_a_run_begins_with_the_values_of_another_one(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path / "day1", DAY_1, epochs=2)
    trained = [weight.numpy() for _, weight in sorted((w.path, w) for w in trainer.model.weights)]
    for source in (tmp_path / "day1", tmp_path / "day1" / "model.keras"):
        began = weights_after(tmp_path / f"from-{source.name}", source)
        for ours, theirs in zip(began, trained, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_values_that_do_not_fit_are_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = train(tmp_path / "day1", DAY_1)

    def wider() -> keras.Model:
        model = keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(5, "softmax")]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    began = weights_after(tmp_path / "new", tmp_path / "day1", wider)
    kernels = [weights for weights in began if weights.shape == (6, 8)]
    np.testing.assert_array_equal(kernels[0], trainer.model.layers[0].kernel.numpy())
    kdist.Trainer(wider, run_dir=tmp_path / "said", start_from=tmp_path / "day1").fit(
        *DAY_2, steps=1, batch_size=10, verbose=2
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("begin")]
    assert line.startswith(f"begin | 2 values of {tmp_path / 'day1'}; new are parameters/")


def test_a_run_that_is_resumed_does_not_begin_again(tmp_path: Path) -> None:
    train(tmp_path / "day1", DAY_1)
    first = weights_after(tmp_path / "new", tmp_path / "day1")
    trainer = kdist.Trainer(models.mlp, run_dir=tmp_path / "new", start_from=tmp_path / "day1")
    trainer.fit(*DAY_2, steps=2, **SIZES)
    assert trainer.result.global_step == 2
    assert any((weight.numpy() != began).any() for weight, began in zip(trainer.model.weights, first))


@pytest.mark.parametrize(("source", "words"), [("nowhere", "no checkpoint"), ("nowhere.keras", "cannot be loaded")])
def test_a_source_that_is_not_there_is_an_error(source: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"run.start_from=.*{source}: .*{words}"):
        weights_after(tmp_path / "new", tmp_path / source)
