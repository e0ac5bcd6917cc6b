"""What a sweep knows of its jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from kdist.cli.sweep import Objective, Sweep, Trial, begin_trial, draw_sweep, objective
from kdist.errors import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


def result(loss: float, accuracy: float, **more: Any) -> dict[str, Any]:
    best = {"loss": (loss, "min"), "accuracy": (accuracy, "max"), "odd": (1.0, None)}
    return {
        "status": "done",
        "best": {name: {"value": value, "step": 10, "mode": mode} for name, (value, mode) in best.items()},
        "metrics": {"train": {"loss": 9.0}, "validation": {}},
        "steps_per_second": 100.0,
        "examples_per_second": 3200.0,
        "seconds": 4.0,
        "workers": 2,
        "strategy": "parameter_server",
        "gradients": {"staleness_mean": 1.5},
        **more,
    }


def add(folder: Path, number: int, overrides: dict[str, str], found: dict[str, Any] | None, **record: Any) -> None:
    job = Trial(folder / str(number), overrides, **{"status": "done" if found else "running", **record})
    job.write()
    if found is not None:
        (job.folder / "result.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (None, Objective("loss", 0.5, "min")),
        ("loss", Objective("loss", 0.5, "min")),
        ("val_accuracy", Objective("accuracy", 0.9, "max")),
        ("steps_per_second", Objective("steps_per_second", 100.0, "max")),
        ("seconds", Objective("seconds", 4.0, "min")),
    ],
)
def test_a_job_returns_the_best_value_of_the_metric(metric: str | None, expected: Objective) -> None:
    assert objective(result(0.5, 0.9), metric, None) == expected


def test_without_validation_it_is_the_training_loss() -> None:
    assert objective(result(0, 0, best={}), None, None) == Objective("train loss", 9.0, "min")


def test_a_metric_that_is_not_there_or_has_no_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sweep\.metric=auc: a run reports loss, accuracy, odd, steps_per_second"):
        objective(result(0.5, 0.9), "auc", None)
    with pytest.raises(ConfigError, match=r"sweep\.metric=odd: say which values are better: sweep\.mode=min"):
        objective(result(0.5, 0.9), "odd", None)
    assert objective(result(0.5, 0.9), "odd", "max") == Objective("odd", 1.0, "max")


def test_a_job_is_begun_once_and_known_again(tmp_path: Path) -> None:
    overrides = ["+recipe=mnist", "optimizer.learning_rate=0.1", "run.seed=1"]
    job = begin_trial(tmp_path / "0", overrides)
    assert job.status == "running"
    assert job.overrides == {"recipe": "mnist", "optimizer.learning_rate": "0.1"}
    # Killed: it runs again. Done, without a result: as well.
    assert begin_trial(tmp_path / "0", overrides).status == "running"
    add(tmp_path, 0, dict(job.overrides), result(1, 0))
    assert begin_trial(tmp_path / "0", overrides).status == "done"
    with pytest.raises(
        ConfigError, match=r"0: holds a trial with recipe=mnist optimizer\.learning_rate=0\.1, not recipe"
    ):
        begin_trial(tmp_path / "0", ["+recipe=mnist", "optimizer.learning_rate=0.2"])


def test_the_table_has_the_best_first_and_what_failed(tmp_path: Path) -> None:
    add(tmp_path, 0, {"recipe": "mnist", "cluster": "1ps1w", "optimizer.learning_rate": "0.1"}, result(0.7, 0.8))
    add(tmp_path, 1, {"recipe": "mnist", "cluster": "1ps2w", "optimizer.learning_rate": "0.1"}, result(0.2, 0.9))
    add(tmp_path, 2, {"recipe": "mnist", "cluster": "1ps2w", "optimizer.learning_rate": "9"}, None, status="failed",
        error="NanTensor: the loss became nan\nmore", exit_code=1)  # fmt: skip
    add(tmp_path, 10, {"recipe": "mnist", "cluster": "1ps1w", "optimizer.learning_rate": "9"}, None)
    (tmp_path / "notes").mkdir()
    sweep = Sweep(tmp_path)
    assert [job.number for job in sweep.trials] == [0, 1, 2, 10]
    assert sweep.swept == ["cluster", "optimizer.learning_rate"]
    heads, rule, *rows, failed = sweep.table()
    assert heads.split(" | ")[0].strip() == "trial"
    assert set(rule) <= {"-", "+"}
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert cells == [
        ["1", "1ps2w", "0.1", "0.2", "100.0", "1.50", "done"],
        ["0", "1ps1w", "0.1", "0.7", "100.0", "1.50", "done"],
        ["2", "1ps2w", "9", "", "", "", "failed"],
        ["10", "1ps1w", "9", "", "", "", "not done"],
    ]
    assert failed == "trial 2 failed: NanTensor: the loss became nan"
    assert [job.number for job in Sweep(tmp_path, "accuracy").best_first()[:2]] == [1, 0]
    sweep.write()
    draw_sweep(sweep, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)
    assert (tmp_path / "sweep.txt").read_text().splitlines() == sweep.table()


def test_a_sweep_without_a_job_that_is_done_has_a_table_and_no_picture(tmp_path: Path) -> None:
    add(tmp_path, 0, {"cluster": "local"}, None, status="failed", error="no", exit_code=2)
    Sweep(tmp_path).write()
    assert not (tmp_path / "sweep.png").exists()
    assert "trial 0 failed: no" in (tmp_path / "sweep.txt").read_text()
