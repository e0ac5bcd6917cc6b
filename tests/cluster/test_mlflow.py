"""Runs in MLflow, with a real store: the user's own run and callback, kdist's tracker, the trials of a sweep."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
from helpers import toy_data

import kdist

mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("tasks_prepared")]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a store that MLflow uses by default."""
    # There MLflow puts the files of its first experiment.
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient()
    client.create_experiment("here", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("here")
    yield client
    # MLflow keeps there what it was told.
    os.environ.clear()
    os.environ.update(before)


def all_runs(client: Any) -> list[Any]:
    return list(client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("local", {"strategy": "mirrored", "devices": 2}),
        pytest.param("local", {}, marks=pytest.mark.long),
        pytest.param("2w", {}, marks=pytest.mark.long),
        pytest.param("2ps2w", {}, marks=pytest.mark.long),
    ],
)
def test_mlflows_own_callback_logs_into_the_run_of_the_user(
    store: Any, tmp_path: Path, cluster: str, options: dict[str, Any]
) -> None:
    from mlflow.keras import MlflowCallback

    x, y = toy_data(128)
    with mlflow.start_run() as run:
        kdist.Trainer(models.mlp, cluster, run_dir=tmp_path / "run", **options).fit(
            x, y, batch_size=8, epochs=2, validation_data=(x, y), callbacks=[MlflowCallback()], verbose=0
        )
    (found,) = all_runs(store)
    assert (found.info.run_id, found.info.status) == (run.info.run_id, "FINISHED")
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "validation_loss"} <= found.data.metrics.keys()
    assert [metric.step for metric in store.get_metric_history(run.info.run_id, "val_loss")] == [0, 1]
    assert found.data.params["optimizer_name"]


def test_a_tracked_run_says_what_ran_and_how_it_ended(store: Any, tmp_path: Path) -> None:
    x, y = toy_data(128)

    def fit(steps: int) -> None:
        kdist.Trainer(
            models.mlp,
            "local",
            run_dir=tmp_path / "run",
            hooks=[kdist.hooks.MlflowTracker(experiment="here", save_model=True, system_metrics=False)],
            seed=3,
        ).fit(x, y, batch_size=8, steps=steps, validation_data=(x, y), verbose=0)

    fit(100)
    fit(150)
    (found,) = all_runs(store)
    assert found.info.status == "FINISHED"
    assert {
        "strategy": "single",
        "cluster": "local",
        "seed": "3",
        "train.batch_size": "8",
    }.items() <= found.data.params.items()
    validations = store.get_metric_history(found.info.run_id, "validation/accuracy")
    steps = [metric.step for metric in validations]
    assert (100 in steps, steps[-1], sorted(set(steps))) == (True, 150, steps)
    assert "train/loss" in found.data.metrics
    assert found.data.metrics["final/validation_accuracy"] == pytest.approx(validations[-1].value)
    files = {artifact.path for artifact in store.list_artifacts(found.info.run_id)}
    assert {"model.keras", "result.json", "metrics.csv", "config.json"} <= files


@pytest.mark.long
def test_a_run_that_fails_is_failed_in_the_tracker(store: Any, tmp_path: Path) -> None:
    class Raises(kdist.hooks.Hook):
        def after_run(self, context: Any, values: Any) -> None:
            raise KeyError("no such tag")

    x, y = toy_data(128)
    tracker = kdist.hooks.MlflowTracker(system_metrics=False)
    trainer = kdist.Trainer(models.mlp, run_dir=tmp_path / "run", hooks=[tracker, Raises()])
    with pytest.raises(KeyError):
        trainer.fit(x, y, batch_size=8, steps=10, verbose=0)
    assert [found.info.status for found in all_runs(store)] == ["FAILED"]


@pytest.mark.long
def test_trials_of_a_sweep_are_children_of_one_run(store: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdist", "-m", "+recipe=mnist_mlp", "+hooks=mlflow", "train.steps=10"]
    keys = ["optimizer.learning_rate=0.1,0.01", f"hooks.mlflow.tracking_uri=sqlite:///{tmp_path}/mlflow.db"]
    subprocess.run([*command, *keys, f"run.dir={tmp_path}/sweep"], cwd=tmp_path, check=True, timeout=120)
    runs = all_runs(store)
    assert len(runs) == 3
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = (run for run in runs if "kdist.sweep" in run.data.tags)
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.params["optimizer.learning_rate"] for run in children} == {"0.1", "0.01"}
