"""Evaluating and predicting with a run that has ended, by the workers of a cluster that is started for it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served_code
from helpers import REPO, result_of

from kdist.cli import evaluate, export, main, predict
from kdist.evaluation.evaluate import WorkerPool
from kdist.evaluation.trained_run import TrainedRun

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]

TRUST = "run.trust=[served_code]"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which has to succeed, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", list(sys.argv))
    monkeypatch.setattr("kdist.fit.signals.exit_at_once", None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(command: Any, *arguments: str) -> str:
        capsys.readouterr()
        code = command.run(list(arguments))
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out.rstrip()

    return call


@pytest.fixture
def by_workers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that workers have computed."""
    found: list[str] = []
    for name in ("evaluate", "predict"):
        original = getattr(WorkerPool, name)

        def noted(*arguments: Any, original: Any = original, name: str = name) -> Any:
            result = original(*arguments)
            found.extend([name] if result is not None else [])
            return result

        monkeypatch.setattr(WorkerPool, name, noted)
    return found


@pytest.mark.long
def test_mnist_is_evaluated_predicted_and_exported_with_the_numbers_of_its_result(
    run: Callable[..., str], by_workers: list[str], tmp_path: Path
) -> None:
    part = f"data.path={REPO / 'recipes' / 'mnist_part.npz'}"
    run(main, "recipe=mnist_mlp", "cluster=2ps2w", "train.steps=300", "run.dir=mnist", part)
    expected = result_of(Path("mnist"))["metrics"]["validation"]
    assert json.loads(run(evaluate, "mnist", "--json"))["metrics"] == pytest.approx(expected, rel=1e-5)
    assert by_workers == []
    found = json.loads(run(evaluate, "mnist", "--json", "cluster=2ps2w"))["metrics"]
    assert found == pytest.approx(expected, rel=1e-5)
    archive = np.load(REPO / "recipes" / "mnist_part.npz")
    np.savez("in.npz", x=archive["x_test"].astype(np.float32) / 255)
    run(predict, "mnist", "--input", "in.npz", "--output", "out.npz", "cluster=1ps2w")
    assert by_workers == ["evaluate", "predict"]
    accuracy = (np.load("out.npz")["predictions"].argmax(1) == archive["y_test"]).mean()
    assert accuracy == pytest.approx(expected["accuracy"], abs=1e-6)
    run(export, "mnist", "--to", "served")
    import tensorflow as tf

    model = tf.saved_model.load("served/1")
    served = model.serve(np.load("in.npz")["x"])
    np.testing.assert_allclose(served, np.load("out.npz")["predictions"], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_what_does_not_fit_here_stays_on_the_servers(
    run: Callable[..., str], by_workers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["model._target_=served_code.build_words", "data._target_=served_code.words", TRUST]
    run(main, *words, "cluster=2ps1w", "train.steps=30", "train.batch_size=16", "run.dir=words")
    expected = pytest.approx(result_of(Path("words"))["metrics"]["validation"], rel=1e-5)
    np.savez("words.npz", x=served_code.words()["x"].numpy().astype(str))
    run(predict, "words", "--input", "words.npz", "--output", "here.npz", TRUST)

    def refuse(self: Any) -> None:
        raise AssertionError("the values came to this process")

    monkeypatch.setattr(TrainedRun, "load", refuse)
    small = [TRUST, "cluster=1ps2w", "run.export_max_bytes=10"]
    assert json.loads(run(evaluate, "words", "--json", *small))["metrics"] == expected
    run(predict, "words", "--input", "words.npz", "--output", "there.npz", *small)
    assert by_workers == ["evaluate", "predict"]
    np.testing.assert_allclose(np.load("there.npz")["predictions"], np.load("here.npz")["predictions"], rtol=1e-5)
