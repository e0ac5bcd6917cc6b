"""A fit after another one: of the same trainer it trains more, of another one it resumes, if anything is left to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
import python_data
from helpers import in_short, result_of, toy_data

import kdist
from kdist.errors import ConfigError
from kdist.strategies.single import Single

X, Y = toy_data(64)
LINE = "{} is already finished; nothing to do"


def trainer_in(run_dir: Path, **arguments: Any) -> kdist.Trainer:
    return kdist.Trainer(lambda: models.mlp("sgd"), run_dir=run_dir, **arguments)


def test_a_second_fit_trains_as_many_epochs_again(run_dir: Path) -> None:
    trainer = trainer_in(run_dir)
    assert trainer.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]
    assert trainer.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]
    assert (trainer.result.global_step, trainer.result.examples) == (8, 128)


def test_a_second_fit_gives_the_numbers_of_one_long_fit(run_dir: Path) -> None:
    once, twice = models.mlp("adam"), models.mlp("adam")
    twice.set_weights(once.get_weights())
    kdist.Trainer(lambda: once, run_dir=run_dir / "once").fit(X, Y, epochs=4, shuffle=False, verbose=0)
    trainer = kdist.Trainer(lambda: twice, run_dir=run_dir / "twice")
    for _ in range(2):
        trainer.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(twice.get_weights()[0], once.get_weights()[0], rtol=1e-5, atol=1e-6)


def test_a_second_fit_shuffles_in_another_order(run_dir: Path) -> None:
    def weights(number: int) -> np.ndarray:
        model = models.mlp("sgd")
        model.set_weights(initial)
        trainer = kdist.Trainer(lambda: model, run_dir=run_dir / str(number), seed=1)
        for _ in range(number):
            trainer.fit(X, Y, epochs=1, verbose=0)
            model.set_weights(initial) if _ + 1 < number else None
        return model.get_weights()[0]

    initial = models.mlp("sgd").get_weights()
    assert np.abs(weights(1) - weights(2)).max() > 1e-6


@pytest.mark.parametrize(
    "arguments", in_short([{"epochs": 2}, {"steps": 3}, {"epochs": 1, "steps_per_epoch": 4}], [{"epochs": 2}])
)
def test_a_run_that_is_done_is_not_started_again(
    arguments: Any, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trainer_in(run_dir)
    history = first.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y))
    before = result_of(run_dir)
    monkeypatch.setattr(Single, "start", None)
    again = trainer_in(run_dir)
    found = again.fit(X, Y, validation_data=(X, Y), **arguments)
    assert capsys.readouterr().out == f"done  | step      4 | {LINE.format(run_dir)}\n"
    assert result_of(run_dir) == before
    assert again.result == first.result
    assert (found.epoch, found.history) == (history.epoch, history.history)
    for value, wanted in zip(again.model.get_weights(), first.model.get_weights()):
        np.testing.assert_array_equal(value, wanted)
    assert int(again.model.optimizer.iterations) == 4


def test_data_of_unknown_length_is_done_after_its_epochs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer_in(run_dir)
    first.fit(python_data.filtered(), epochs=2, verbose=0)
    with monkeypatch.context() as patch:
        patch.setattr(Single, "start", None)
        trainer_in(run_dir).fit(python_data.filtered(), epochs=2, verbose=0)
    again = trainer_in(run_dir)
    assert again.fit(python_data.filtered(), epochs=3, verbose=0).epoch == [0, 1, 2]
    assert again.result.global_step == first.result.global_step // 2 * 3


def test_a_model_with_random_seeds_and_averages_gets_its_values(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        model = models.dropout()
        model.compile(keras.optimizers.Adam(use_ema=True, ema_momentum=0.5), "sparse_categorical_crossentropy")
        return model

    first = kdist.Trainer(build, run_dir=run_dir)
    first.fit(X, Y, epochs=2, verbose=0)
    monkeypatch.setattr(Single, "start", None)
    again = kdist.Trainer(build, run_dir=run_dir)
    again.fit(X, Y, epochs=2, verbose=0)
    for value, wanted in zip(again.model.get_weights(), first.model.get_weights()):
        np.testing.assert_array_equal(value, wanted)


def test_after_it_the_next_fit_trains_more(run_dir: Path) -> None:
    trainer_in(run_dir).fit(X, Y, epochs=2, verbose=0)
    trainer = trainer_in(run_dir)
    trainer.fit(X, Y, epochs=2, verbose=0)
    trainer.fit(X, Y, epochs=1, verbose=0)
    assert trainer.result.global_step == 6
    # And a step that it has reached is reached.
    trainer.fit(X, Y, steps=5, verbose=0)
    assert trainer.result.global_step == 6


def test_a_run_that_did_not_end_well_is_ended(run_dir: Path) -> None:
    trainer_in(run_dir).fit(X, Y, epochs=2, verbose=0)
    (run_dir / "result.json").unlink()
    (run_dir / "model.keras").unlink()
    trainer_in(run_dir).fit(X, Y, epochs=2, verbose=0)
    assert result_of(run_dir)["global_step"] == 4
    assert (run_dir / "model.keras").exists()


def test_a_run_of_another_model_is_refused_as_before(run_dir: Path) -> None:
    trainer_in(run_dir).fit(X, Y, epochs=2, verbose=0)
    with pytest.raises(kdist.errors.CheckpointError, match="is of another model"):
        kdist.Trainer(models.dropout, run_dir=run_dir).fit(X, Y, epochs=2, verbose=0)


def test_a_new_run_of_a_trained_model_needs_a_later_step(run_dir: Path) -> None:
    model = models.mlp("sgd")
    kdist.Trainer(lambda: model, run_dir=run_dir / "one").fit(X, Y, steps=3, verbose=0)
    with pytest.raises(ConfigError, match="steps=2: the model has had 3 updates"):
        kdist.Trainer(lambda: model, run_dir=run_dir / "two").fit(X, Y, steps=2, verbose=0)
