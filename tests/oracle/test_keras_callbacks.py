"""Keras callbacks do under `Trainer.fit` what they do under `keras.Model.fit`."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from compatibility import CALLBACKS
from helpers import in_short, needs_keras_3_13, tags_of, toy_data

import kdist
from kdist.errors import ClusterError, ConfigError

BATCH, STEPS, EPOCHS = 16, 4, 5
callbacks = keras.callbacks


def build(learning_rate: float = 0.5, use_ema: bool = False, steps_per_execution: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    dense = [layers.Dense(8, "tanh", name="hidden"), layers.Dense(3, activation="softmax", name="out")]
    model = keras.Sequential([layers.Input((6,)), *dense], name="model")
    optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9, use_ema=use_ema, ema_momentum=0.8)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def data() -> dict[str, Any]:
    x, y = toy_data(BATCH * STEPS + 32)
    return {
        "x": x[:-32],
        "y": y[:-32],
        "validation_data": (x[-32:], y[-32:]),
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "shuffle": False,
        "verbose": 0,
    }


def both(make: Callable[[Path], list[Any]], folder: Path, **compiled: Any) -> list[tuple[keras.Model, Any, list[Any]]]:
    """The model, its history and its callbacks, from Keras and from kdist."""
    came_to = []
    for name in ("keras", "kdist"):
        (folder / name).mkdir()
        used = make(folder / name)
        if name == "keras":
            model = build(**compiled)
            history = model.fit(**data(), callbacks=used)
        else:
            trainer = kdist.Trainer(lambda: build(**compiled), run_dir=folder / "run", steps_per_call=4)
            history = trainer.fit(**data(), callbacks=used)
            model = trainer.model
        came_to.append((model, history, used))
    return came_to


def assert_same(came_to: list[tuple[keras.Model, Any, list[Any]]]) -> None:
    (theirs, their_history, _), (ours, our_history, _) = came_to
    assert our_history.epoch == their_history.epoch
    assert our_history.history.keys() == their_history.history.keys()
    for name, values in their_history.history.items():
        np.testing.assert_allclose(our_history.history[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    for our, their in zip(ours.get_weights(), theirs.get_weights()):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-6)
    assert float(ours.optimizer.learning_rate) == pytest.approx(float(theirs.optimizer.learning_rate))


class EveryEvent(callbacks.Callback):
    """Writes down every event with what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []


def _noting(name: str) -> Callable[..., None]:
    def note(self: EveryEvent, *arguments: Any, **logs: Any) -> None:
        told = [value for value in arguments if not isinstance(value, dict) and value is not None]
        keys = [sorted(value) for value in arguments if isinstance(value, dict)] + [
            sorted(v or {}) for v in logs.values()
        ]
        self.events.append((name, *told, *(k for k in keys if k)))

    return note


for _event in ("train", "test"):
    for _when in ("begin", "end", "batch_begin", "batch_end"):
        setattr(EveryEvent, f"on_{_event}_{_when}", _noting(f"on_{_event}_{_when}"))
for _when in ("begin", "end"):
    setattr(EveryEvent, f"on_epoch_{_when}", _noting(f"on_epoch_{_when}"))


def test_every_event_comes_as_in_keras(tmp_path: Path) -> None:
    came_to = both(lambda folder: [EveryEvent()], tmp_path)
    assert_same(came_to)
    (_, _, (theirs,)), (_, _, (ours,)) = came_to
    assert ours.events == theirs.events


@pytest.mark.long
def test_batch_events_come_once_for_the_steps_of_an_execution(tmp_path: Path) -> None:
    # Four steps are an execution of three and one of the rest.
    came_to = both(lambda folder: [EveryEvent()], tmp_path, steps_per_execution=3)
    assert_same(came_to)
    (_, _, (theirs,)), (_, _, (ours,)) = came_to
    assert ours.events == theirs.events


#: It sets the learning rate by the logs; the others run in `make long`.
IN_SHORT = {"ReduceLROnPlateau"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_SHORT else pytest.mark.long) for n in CALLBACKS])
def test_training_comes_to_the_same(name: str, tmp_path: Path) -> None:
    came_to = both(CALLBACKS[name], tmp_path)
    assert_same(came_to)
    assert all(type(callback) is getattr(callbacks, name) for _, _, used in came_to for callback in used)


def test_early_stopping_restores_the_best_weights(tmp_path: Path) -> None:
    assert_same(
        both(
            lambda folder: [callbacks.EarlyStopping("val_accuracy", patience=2, restore_best_weights=True, mode="min")],
            tmp_path,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("swap_on_epoch", [pytest.param(False, marks=pytest.mark.long), True])
def test_swap_ema_weights(swap_on_epoch: bool, tmp_path: Path) -> None:
    came_to = both(lambda folder: [callbacks.SwapEMAWeights(swap_on_epoch)], tmp_path, use_ema=True)
    assert_same(came_to)


@pytest.mark.parametrize("assigns", in_short([False, True], {True}))
def test_the_end_of_training_has_the_moving_averages(assigns: bool, tmp_path: Path) -> None:
    class AtEnd(callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            if assigns:
                self.model.layers[0].bias.assign(np.arange(8))
            self.weights = self.model.get_weights()

    came_to = both(lambda folder: [AtEnd()], tmp_path, use_ema=True)
    assert_same(came_to)
    (_, _, (theirs,)), (_, _, (ours,)) = came_to
    for our, their in zip(ours.weights, theirs.weights):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_change_of_weights_in_a_batch_event_is_trained_on(tmp_path: Path) -> None:
    class Shrinks(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * 0.9)

    assert_same(both(lambda folder: [Shrinks()], tmp_path))


def test_stop_training_stops_at_that_batch(tmp_path: Path) -> None:
    class Stops(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = int(self.model.optimizer.iterations) == 6

    trainer = kdist.Trainer(build, run_dir=tmp_path)
    trainer.fit(**data(), callbacks=[Stops()])
    assert trainer.result.global_step == 6
    assert trainer.result.stopped_by == "stop_training"


def test_model_checkpoint_saves_the_model_of_its_epoch(tmp_path: Path) -> None:
    def make(folder: Path) -> list[Any]:
        return [
            callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
            callbacks.ModelCheckpoint(
                folder / "best.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
            ),
        ]

    assert_same(both(make, tmp_path))
    for epoch in range(1, EPOCHS + 1):
        theirs, ours = (keras.saving.load_model(tmp_path / who / f"{epoch}.keras") for who in ("keras", "kdist"))
        assert int(ours.optimizer.iterations) == epoch * STEPS
        for our, their in zip(ours.get_weights(), theirs.get_weights()):
            np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "kdist" / "best.weights.h5").exists()


@pytest.mark.long
def test_model_checkpoint_by_batches(tmp_path: Path) -> None:
    trainer = kdist.Trainer(build, run_dir=tmp_path / "run")
    trainer.fit(**data(), callbacks=[callbacks.ModelCheckpoint(tmp_path / "last.keras", save_freq=7)])
    assert int(keras.saving.load_model(tmp_path / "last.keras").optimizer.iterations) == 14


@pytest.mark.long
def test_csv_logger(tmp_path: Path) -> None:
    (*_,), (*_,) = both(lambda folder: [callbacks.CSVLogger(folder / "log.csv")], tmp_path)
    theirs, ours = (list(csv.DictReader((tmp_path / who / "log.csv").open())) for who in ("keras", "kdist"))
    assert len(ours) == EPOCHS
    for our, their in zip(ours, theirs):
        assert our.keys() == their.keys()
        np.testing.assert_allclose([float(v) for v in our.values()], [float(v) for v in their.values()], rtol=1e-4)


@pytest.mark.long
def test_tensorboard(tmp_path: Path) -> None:
    both(lambda folder: [callbacks.TensorBoard(folder, histogram_freq=2, profile_batch=(2, 4))], tmp_path)
    for split in ("train", "validation"):
        assert tags_of(tmp_path / "kdist" / split) == tags_of(tmp_path / "keras" / split)
    assert list((tmp_path / "kdist").rglob("*.xplane.pb"))


def test_a_batch_event_of_a_subclass_is_called_whatever_the_class_of_keras_would_do_at_it(tmp_path: Path) -> None:
    class Counts:
        batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    class Board(Counts, callbacks.TensorBoard):
        pass

    class Saver(Counts, callbacks.ModelCheckpoint):
        pass

    came_to = both(lambda folder: [Board(folder), Saver(folder / "last.keras")], tmp_path)
    assert_same(came_to)
    (_, _, theirs), (_, _, ours) = came_to
    assert [used.batches for used in ours] == [used.batches for used in theirs] == [STEPS * EPOCHS] * 2


def test_what_a_callback_assigns_during_validation_is_trained_on(tmp_path: Path) -> None:
    class Shrinks(callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel * 0.9)

    assert_same(both(lambda folder: [Shrinks()], tmp_path))


@needs_keras_3_13
def test_terminate_on_nan_stops_with_an_error_or_without(tmp_path: Path) -> None:
    given = data()
    given["x"] = np.full_like(given["x"], np.nan)
    trainer = kdist.Trainer(build, run_dir=tmp_path / "stops", callbacks=[callbacks.TerminateOnNaN()])
    trainer.fit(**given)
    assert trainer.result.status == "done"
    assert trainer.result.stopped_by == "NanTensor"
    assert trainer.result.global_step < STEPS * EPOCHS
    assert trainer.model.stop_training
    raises = kdist.Trainer(build, run_dir=tmp_path / "raises", callbacks=[callbacks.TerminateOnNaN(raise_error=True)])
    with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch"):
        raises.fit(**given)
    assert raises.result.status == "failed"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda folder: callbacks.BackupAndRestore(folder / "b"), ["BackupAndRestore cannot be used", "run_dir"]),
        (lambda folder: print, ["builtin_function_or_method is no keras.callbacks.Callback"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    given: Callable[[Path], Any], said: list[str], tmp_path: Path
) -> None:
    for use in (
        lambda: kdist.Trainer(build, run_dir=tmp_path, callbacks=[given(tmp_path)]),
        lambda: kdist.Trainer(build, run_dir=tmp_path).fit(**data(), callbacks=[given(tmp_path)]),
    ):
        with pytest.raises(ConfigError) as error:
            use()
        for words in said:
            assert words in str(error.value)


@pytest.mark.parametrize("epochs", in_short([EPOCHS, EPOCHS - 1], {EPOCHS - 1}))
def test_training_begins_anew_for_callbacks_if_the_cluster_fails_before_its_end_is_saved(
    epochs: int, tmp_path: Path
) -> None:
    class Stops(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == epochs - 1

    class FailsOnce(kdist.hooks.Hook):
        has_failed = False

        def end(self, session: Any) -> None:
            if session.global_step == epochs * STEPS and not self.has_failed and session.checkpoints.steps():
                self.has_failed = True
                raise ClusterError("ps:0 is lost")

    class Last(kdist.hooks.CheckpointSaver):
        """Comes behind the callbacks, as every saver."""

        def __init__(self) -> None:
            super().__init__(every_steps=7)
            self._fails = FailsOnce()

        def end(self, session: Any) -> None:
            self._fails.end(session)
            super().end(session)

    noted = EveryEvent()
    trainer = kdist.Trainer(build, run_dir=tmp_path, hooks=[Last()])
    with pytest.warns(UserWarning, match=r"ps:0 is lost; restarting the cluster from checkpoints/ckpt-14"):
        history = trainer.fit(**data(), callbacks=[noted, Stops(), callbacks.CSVLogger(tmp_path / "log.csv")])
    assert trainer.result.global_step == epochs * STEPS
    assert history.epoch == list(range(epochs))
    told = [event[0] for event in noted.events]
    assert (told.count("on_train_begin"), told.count("on_train_end")) == (2, 2)
    assert (tmp_path / "log.csv").read_text().startswith("epoch,")
