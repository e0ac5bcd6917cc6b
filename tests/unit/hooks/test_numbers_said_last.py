"""The numbers that a run says last are those of the model that it saves, also if a callback has changed its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from helpers import result_of

import kdist


def build_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    # It diverges, so that the best values are those of the first epoch.
    model.compile(keras.optimizers.SGD(1.2), "mse", metrics=["mae"])
    return model


class Restore(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        self.first = self.model.get_weights()

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self.first)


x = np.linspace(-2, 2, 40, dtype=np.float32)[:, None]
y = 3 * x


@pytest.mark.parametrize("callback", [keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True), Restore()])
def test_validation_is_of_the_weights_that_a_callback_has_restored(
    run_dir: Path, callback: keras.callbacks.Callback, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = kdist.Trainer(build_model, run_dir=run_dir)
    trainer.fit(x, y, batch_size=40, epochs=4, validation_data=(x, y), callbacks=[callback])
    loss, mae = keras.saving.load_model(run_dir / "model.keras").evaluate(x, y, verbose=0)
    assert result_of(run_dir)["metrics"]["validation"] == pytest.approx({"loss": loss, "mae": mae}, rel=1e-5)
    done = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("done"))
    assert f"loss {loss:.4f}" in done


def test_no_callback_sees_a_validation_after_the_end_of_training(run_dir: Path) -> None:
    # It has closed its files by then.
    callbacks = [Restore(), keras.callbacks.TensorBoard(run_dir.with_name("board"))]
    trainer = kdist.Trainer(build_model, run_dir=run_dir)
    trainer.fit(x, y, batch_size=40, epochs=2, validation_data=(x, y), callbacks=callbacks)
    assert trainer.result.status == "done"


def test_without_validation_data_a_warning_says_what_the_numbers_are_of(run_dir: Path) -> None:
    with pytest.warns(UserWarning, match="a callback has changed the weights after step 2; without validation_data"):
        kdist.Trainer(build_model, run_dir=run_dir).fit(x, y, batch_size=40, epochs=2, callbacks=[Restore()])
