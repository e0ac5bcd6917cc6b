"""Examples that do not fill the last batch, and epochs that do not end with the data: the numbers of Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short, toy_data

import kdist

X, Y = (part[:20] for part in toy_data())


class Batches(keras.callbacks.Callback):
    """The batches of each epoch, and what Keras says of how many there will be."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append(self.params["steps"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def of_unknown_length() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda *_: True).batch(4)


def of_python() -> tf.data.Dataset:
    signature = (tf.TensorSpec((6,)), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(lambda: zip(X, Y), output_signature=signature).batch(4)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "arrays": ((X, Y), {"batch_size": 8, "epochs": 3}),
    "arrays and fewer steps": ((X, Y), {"batch_size": 8, "epochs": 4, "steps_per_epoch": 2}),
    "arrays and more steps": ((X, Y), {"batch_size": 8, "epochs": 2, "steps_per_epoch": 5}),
    "arrays without a batch size": ((X, Y), {"epochs": 2, "steps_per_epoch": 3}),
    "a dataset and fewer steps": ((dataset(),), {"epochs": 4, "steps_per_epoch": 2}),
    "a dataset and more steps": ((dataset(),), {"epochs": 2, "steps_per_epoch": 5}),
    # Of 5 batches. An epoch that begins at the end of a pass is empty in Keras; here it begins with the next pass.
    "unknown length and fewer steps": ((of_unknown_length(),), {"epochs": 5, "steps_per_epoch": 2}),
    "unknown length and more steps": ((of_unknown_length(),), {"epochs": 2, "steps_per_epoch": 7}),
    "unknown length and steps of two passes": ((of_python(),), {"epochs": 4, "steps_per_epoch": 3}),
    "fewer examples than a batch": ((X[:3], Y[:3]), {"epochs": 2}),
}
#: Epochs that end within a pass, and passes that end within an epoch.
IN_SHORT = {
    "arrays and more steps",
    "a dataset and fewer steps",
    "unknown length and fewer steps",
    "fewer examples than a batch",
}


class Kept(keras.metrics.SparseCategoricalAccuracy):
    """Counts over all epochs."""

    def reset_state(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore:(?i).*your input ran out of data")
@pytest.mark.parametrize("name", in_short(CASES, IN_SHORT))
def test_weights_history_and_batches_are_those_of_keras(name: str, run_dir: Path) -> None:
    data, arguments = CASES[name]
    compared_with_keras(data, arguments, dict, run_dir)


@pytest.mark.filterwarnings("ignore:(?i).*your input ran out of data")
@pytest.mark.parametrize("steps_per_epoch", in_short([None, 1, 3], {3}))
def test_an_epoch_is_of_whole_executions(steps_per_epoch: int | None, run_dir: Path) -> None:
    arguments = {"batch_size": 4, "epochs": 3, "steps_per_epoch": steps_per_epoch}
    compared_with_keras((X, Y), arguments, lambda: {"steps_per_execution": 2}, run_dir)


def test_a_metric_that_is_not_reset_goes_on_counting(run_dir: Path) -> None:
    compared_with_keras((X, Y), {"batch_size": 8, "epochs": 3}, lambda: {"metrics": [Kept(), "accuracy"]}, run_dir)


def compared_with_keras(
    data: Any, arguments: dict[str, Any], compiled: Callable[[], dict[str, Any]], run_dir: Path
) -> None:
    keras.utils.set_random_seed(3)
    ours, theirs = models.mlp("sgd"), models.mlp("sgd")
    theirs.set_weights(ours.get_weights())
    for model in (ours, theirs) if compiled() else ():
        model.compile("sgd", model.loss, **compiled())
    of_ours, of_theirs = Batches(), Batches()
    expected = theirs.fit(*data, verbose=0, shuffle=False, callbacks=[of_theirs], **arguments)
    trainer = kdist.Trainer(ours, run_dir=run_dir, callbacks=[of_ours])
    history = trainer.fit(*data, verbose=0, shuffle=False, **arguments)
    assert of_ours.seen == of_theirs.seen
    assert history.history.keys() == expected.history.keys()
    for key, values in expected.history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-5, err_msg=key)
    for value, wanted in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:(?i).*your input ran out of data")
@pytest.mark.parametrize(
    ("make", "stops_at"),
    [
        (of_python, 6),
        *(pytest.param(of_unknown_length, step, marks=pytest.mark.long) for step in (4, 5, 6, 9)),
        *(pytest.param(of_python, step, marks=pytest.mark.long) for step in (4, 5, 9)),
    ],
)
def test_a_run_that_stopped_within_a_pass_of_unknown_length_goes_on_there(
    make: Callable[[], tf.data.Dataset], stops_at: int, run_dir: Path
) -> None:
    """Epochs of 2, 2 and 1 steps: it stops at their ends, and in the middle of one."""
    keras.utils.set_random_seed(3)
    arguments: dict[str, Any] = {"epochs": 6, "steps_per_epoch": 2, "verbose": 0}
    whole, first, again = (models.mlp("sgd") for _ in range(3))
    for model in (first, again):
        model.set_weights(whole.get_weights())
    batches = Batches()
    expected = kdist.Trainer(whole, run_dir=run_dir / "whole", callbacks=[batches]).fit(make(), **arguments)
    saver = kdist.hooks.CheckpointSaver(every_steps=1)
    hooks = [saver, kdist.hooks.StopAtStep(stops_at)]
    kdist.Trainer(first, run_dir=run_dir / "parts", hooks=hooks).fit(make(), **arguments)
    seen = Batches()
    trainer = kdist.Trainer(again, run_dir=run_dir / "parts", hooks=[saver], callbacks=[seen])
    history = trainer.fit(make(), **arguments)
    assert trainer.result.global_step == 10
    numbers, whole_numbers = ([e for e in c.seen[1:] if isinstance(e, int)] for c in (seen, batches))
    assert numbers == whole_numbers[stops_at:]
    assert history.epoch == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(history.history["loss"][4:], expected.history["loss"][4:], rtol=1e-5)
    for value, wanted in zip(again.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


def test_a_run_that_stopped_within_a_pass_goes_on_there(run_dir: Path) -> None:
    """Epochs of 2 and 1 steps: the run stops after the fourth step, in the middle of its third epoch."""
    keras.utils.set_random_seed(3)
    arguments: dict[str, Any] = {"batch_size": 8, "steps_per_epoch": 2, "shuffle": False, "verbose": 0}
    whole, first = models.mlp("sgd"), models.mlp("sgd")
    first.set_weights(whole.get_weights())
    start = whole.get_weights()
    expected = whole.fit(X, Y, epochs=4, **arguments)
    saver = kdist.hooks.CheckpointSaver(every_steps=1)
    hooks = [saver, kdist.hooks.StopAtStep(4)]
    kdist.Trainer(first, run_dir=run_dir, hooks=hooks).fit(X, Y, epochs=4, **arguments)
    again = models.mlp("sgd")
    again.set_weights(start)
    history = kdist.Trainer(again, run_dir=run_dir, hooks=[saver]).fit(X, Y, epochs=4, **arguments)
    assert history.epoch == [0, 1, 2, 3]
    np.testing.assert_allclose(history.history["loss"][-1], expected.history["loss"][-1], rtol=1e-5)
    for value, wanted in zip(again.get_weights(), whole.get_weights()):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)


def test_steps_go_on_repeating_the_data(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    history = trainer.fit(X, Y, batch_size=8, steps=10, steps_per_epoch=5, verbose=0)
    assert (trainer.result.global_step, history.epoch) == (10, [0, 1])
