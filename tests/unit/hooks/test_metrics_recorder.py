"""The lines that a fit writes to `metrics.csv`, and the history of a run that is resumed."""

from pathlib import Path
from typing import Any

import keras
import models
import numpy as np
import pytest
from fakes import CountingStrategy, FakeClock, make_session, run_all
from helpers import in_short, result_of, toy_data

import kdist
from kdist.hooks import CheckpointSaver, LoggingTensor, StopAtStep
from kdist.hooks.metrics_recorder import MetricsRecorder
from kdist.run.metrics_file import MetricsFile, read_rows
from kdist.run.result import now

X, Y = toy_data()
#: 256 examples in batches of 32.
STEPS_PER_EPOCH = 8


def fit(run_dir: Path, *, hooks: Any = (), callbacks: Any = (), **arguments: Any) -> keras.callbacks.History:
    def build() -> keras.Model:
        model = models.mlp()
        model.set_weights([np.linspace(-0.5, 0.5, w.size).reshape(w.shape) for w in model.get_weights()])
        return model

    trainer = kdist.Trainer(build, run_dir=run_dir, seed=1, hooks=hooks)
    return trainer.fit(X, Y, verbose=0, shuffle=False, callbacks=callbacks, **arguments)


def test_a_row_at_each_report_validation_and_epoch(run_dir: Path) -> None:
    history = fit(
        run_dir, hooks=[LoggingTensor(every_steps=4)], epochs=2, validation_data=(X, Y), validation_every_steps=6
    )
    rows = read_rows(run_dir)
    assert [(row["step"], row["epoch"], row["kind"]) for row in rows] == [
        (4, 0, "train"), (6, 0, "validation"), (8, 0, "train"), (8, 0, "validation"), (8, 0, "epoch"),
        (12, 1, "train"), (12, 1, "validation"), (16, 1, "train"), (16, 1, "validation"), (16, 1, "epoch"),
    ]  # fmt: skip
    epochs = [row for row in rows if row["kind"] == "epoch"]
    for name, values in history.history.items():
        assert [row[name] for row in epochs] == values
    assert {round(row["learning_rate"], 6) for row in rows} == {0.001}
    assert np.mean([row["loss"] for row in rows[:3] if row["kind"] == "train"]) == pytest.approx(epochs[0]["loss"])
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    # Not of a strategy without stale gradients.
    assert not any("staleness" in row for row in rows)
    assert all(row["steps_per_second"] > 0 for row in rows[5:] if row["kind"] != "validation")


def test_rates_and_staleness_are_of_the_steps_of_their_row(tmp_path: Path) -> None:
    class Asynchronous(CountingStrategy):
        is_asynchronous = True

        def run(self, *arguments: Any) -> Any:
            logs = super().run(*arguments)
            logs.staleness[:] = self.step
            return logs

    clock = FakeClock()
    recorder = MetricsRecorder(MetricsFile(tmp_path), clock)
    hooks = [recorder, LoggingTensor(every_steps=10, clock=clock), StopAtStep(last_step=20)]
    run_all(make_session(hooks, Asynchronous(clock, secs_per_step=0.5), clock=clock))
    assert [
        (r["step"], r["seconds"], r["steps_per_second"], r["staleness"], r["loss"]) for r in read_rows(tmp_path)
    ] == [
        (10, 5.0, 2.0, 10.0, 5.5),
        # Runs take a second by now: the mean of 12, 14, 16, 18 and 20.
        (20, 10.0, 2.0, 16.0, 15.5),
    ]


@pytest.mark.parametrize("stopped_at", in_short([12, 16], {12}), ids=["in the middle of an epoch", "at the end of one"])
def test_a_run_that_is_resumed_has_the_history_of_all_of_it(stopped_at: int, run_dir: Path, tmp_path: Path) -> None:
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    arguments: dict[str, Any] = {"validation_data": (X, Y), "validation_freq": 2, "callbacks": [halve]}
    whole = fit(tmp_path / "whole", epochs=4, **arguments)
    part = fit(run_dir, steps=stopped_at, **arguments)
    assert part.epoch == [0, 1]
    history = fit(run_dir, epochs=4, **arguments)
    assert history.epoch == whole.epoch == [0, 1, 2, 3]
    assert history.history.keys() == whole.history.keys()
    assert history.history["learning_rate"] == whole.history["learning_rate"]
    for name in ("loss", "val_loss", "accuracy"):
        found, expected = history.history[name], whole.history[name]
        # Of the epoch that was stopped, the history has its second part.
        kept = [0, 2, 3] if stopped_at == 12 and not name.startswith("val_") else range(len(expected))
        assert len(found) == len(expected)
        assert [found[i] for i in kept] == pytest.approx([expected[i] for i in kept], rel=1e-4)
    # Nothing is left to train: it is the same, and so are the metrics of training.
    again = fit(run_dir, epochs=4, **arguments)
    assert (again.epoch, again.history) == (history.epoch, history.history)
    assert result_of(run_dir)["metrics"]["train"]["loss"] == history.history["loss"][-1]


def test_steps_after_the_checkpoint_are_recorded_once(run_dir: Path) -> None:
    class Fail(kdist.hooks.Hook):
        def after_run(self, context: Any, values: Any) -> None:
            if values.global_step >= 22:
                raise RuntimeError("the hook failed")

        def due_in(self, step: int) -> int | None:
            return 22 - step if step < 22 else None

    hooks = [LoggingTensor(every_steps=2), CheckpointSaver(every_steps=10)]
    with pytest.raises(RuntimeError):
        fit(run_dir, hooks=[*hooks, Fail()], epochs=4)
    assert max(row["step"] for row in read_rows(run_dir)) == 22
    history = fit(run_dir, hooks=hooks, epochs=4)
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(2, 33, 2))
    assert history.epoch == [row["epoch"] for row in rows if row["kind"] == "epoch"] == [0, 1, 2, 3]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_a_second_fit_has_a_history_of_its_own(run_dir: Path) -> None:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir)
    for _ in range(2):
        assert trainer.fit(X, Y, epochs=2, verbose=0).epoch == [0, 1]
    epochs = [row for row in read_rows(run_dir) if row["kind"] == "epoch"]
    assert [(row["step"], row["epoch"]) for row in epochs] == [(8, 0), (16, 1), (24, 0), (32, 1)]
    # The first fit of the program, run again, is what it was.
    assert fit(run_dir, epochs=2, steps=None).epoch == [0, 1]


def test_the_result_says_where_the_run_comes_from(run_dir: Path) -> None:
    before = now()
    trainer = kdist.Trainer(
        models.mlp, run_dir=run_dir, strategy="auto", seed=5, hparams={"units": 8}, steps_per_call=2
    )
    trainer.fit(X, Y, batch_size=16, steps=4, verbose=0)
    found = result_of(run_dir)
    assert (found["format"], found["seed"], found["strategy"], found["cluster"]) == (1, 5, "single", "local")
    assert found["overrides"] == []
    config = found["config"]
    assert config["train"]["batch_size"] == 16
    assert (config["train"]["steps"], config["train"]["steps_per_call"]) == (4, 2)
    assert (config["strategy"]["name"], config["cluster"]["shape"]) == ("single", "local")
    assert (config["run"]["seed"], config["run"]["dir"], config["hparams"]) == (5, str(run_dir), {"units": 8})
    assert config["fit"]["model"].startswith("models.mlp, ")
    assert config["fit"]["loss"] == "sparse_categorical_crossentropy"
    assert before <= found["started"] <= found["ended"] <= now()
    assert found["host"]
    assert {"python", "kdist", "tensorflow", "keras"} <= found["versions"].keys()
