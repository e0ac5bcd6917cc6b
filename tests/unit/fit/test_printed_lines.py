"""The lines of a fit say what their averages are over, and why training has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from helpers import toy_data

import kdist
from kdist.console.lines import _value
from kdist.hooks import LoggingTensor, StopAtStep

X, Y = toy_data(64)


def printed_by(
    run_dir: Path, capsys: pytest.CaptureFixture[str], hooks: Any = (), **arguments: Any
) -> tuple[kdist.Trainer, list[str]]:
    trainer = kdist.Trainer(models.mlp, run_dir=run_dir, hooks=hooks)
    arguments = {"x": X, "y": Y, "batch_size": 8, **arguments}
    trainer.history = trainer.fit(**arguments).history
    return trainer, capsys.readouterr().out.splitlines()


def without_seconds(line: str) -> str:
    return line.rpartition(" | ")[0]


def test_a_fit_with_epochs_prints_a_line_for_each(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, lines = printed_by(run_dir, capsys, epochs=2, validation_data=(X, Y))
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    shown = [" | ".join(f"{name} {trainer.history[name][epoch]:.4f}" for name in names) for epoch in range(2)]
    epochs = [line for line in lines if line.startswith("epoch")]
    assert epochs == [f"epoch 1/2 | {shown[0]}", f"epoch 2/2 | {shown[1]}"]
    validated = trainer.result.metrics["validation"]
    metrics = " | ".join(f"{name} {value:.4f}" for name, value in validated.items())
    assert without_seconds(lines[-1]) == f"done  | step     16/16 | {metrics} | of validation | epochs=2 done"


def test_the_last_line_has_the_last_epoch_and_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, lines = printed_by(run_dir, capsys, steps=20)
    assert not [line for line in lines if line.startswith("epoch")], "the user asked for steps"
    metrics = " | ".join(f"{name} {_value(trainer.history[name][-1])}" for name in ("loss", "accuracy"))
    assert without_seconds(lines[-1]) == f"done  | step     20/20 | {metrics} | over 4 steps | steps=20 done"
    assert trainer.result.stopped_by == "StopAtStep"


def test_a_line_says_how_many_steps_it_is_over(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = printed_by(run_dir, capsys, [LoggingTensor(every_steps=5)], steps=11)
    assert [line.count("over 5 steps") for line in lines if line.startswith("train")] == [1, 1]


def test_a_hook_of_the_user_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = printed_by(run_dir, capsys, [StopAtStep(last_step=5)], epochs=2)
    assert without_seconds(lines[-1]).endswith(" | over 5 steps | stopped by StopAtStep")
    assert not [line for line in lines if line.startswith("epoch")], "none is complete"
