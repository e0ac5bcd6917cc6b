"""The jobs of a sweep, as the sweep knows them."""

import itertools
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kdist.errors import ConfigError
from kdist.storage.folder import Folder
from kdist.storage.object_storage import folder_at
from kdist.sweeps.plot import picture_of
from kdist.sweeps.sweep import Objective, Sweep, Trial, begin_trial, bring_files, objective

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
        "global_step": 30,
        "workers": 2,
        "strategy": "parameter_server",
        "gradients": {"staleness_mean": 1.5},
        **more,
    }


@pytest.fixture(params=["{}", "file://{}", "memory://bucket{}"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    """The folder of a sweep, wherever it may be."""
    yield folder_at(request.param.format(tmp_path / "sweep"), 1.0)
    MemoryFileSystem.store.clear()


def add(folder: Folder, number: int, overrides: dict[str, str], found: Any, **record: Any) -> None:
    Trial(str(number), overrides, **{"status": "done" if found else "running", **record}).write(folder)
    if found is not None:
        folder.write(f"{number}/result.json", json.dumps(found).encode())


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


def test_a_job_is_begun_once_and_known_again(folder: Folder) -> None:
    overrides = ["+recipe=mnist", "optimizer.learning_rate=0.1", "run.seed=1"]
    job = begin_trial(folder, "0", overrides)
    assert job.status == "running"
    assert job.overrides == {"recipe": "mnist", "optimizer.learning_rate": "0.1", "run.seed": "1"}
    # Killed: it runs again. Done, without a result: as well.
    assert begin_trial(folder, "0", overrides).status == "running"
    add(folder, 0, dict(job.overrides), result(1, 0))
    assert begin_trial(folder, "0", overrides).status == "done"
    with pytest.raises(
        ConfigError, match=r"0: holds a trial with recipe=mnist optimizer\.learning_rate=0\.1 run\.seed=1, not"
    ):
        begin_trial(folder, "0", ["+recipe=mnist", "optimizer.learning_rate=0.1", "run.seed=2", "run.grace_secs=5"])


def test_trials_are_found_whatever_their_folders_are_called(folder: Folder) -> None:
    names = {0: "units=8,run.trust=[mine]", 1: "units=4,data.path=/a/b"}
    for number, name in names.items():
        begin_trial(folder, name, [f"model.units={8 - 4 * number}"], number)
    assert begin_trial(folder, names[1], ["model.units=4"], 7).number == 7
    Trial(names[0], {"model.units": "8"}, "failed", "it broke", 2, 0).write(folder)
    sweep = Sweep(folder)
    assert [trial.name for trial in sweep.trials] == [names[0], names[1]]
    assert [trial.exit_code for trial in sweep.failed] == [2]
    *_, unfinished, failed, why = sweep.table()
    assert {row.split(" | ")[1].strip() for row in (unfinished, failed)} == {"0", "7"}
    assert why == f"trial 0 ({names[0]}) failed: it broke"


@pytest.mark.parametrize("name", [".", "..", "../elsewhere"])
def test_a_trial_stays_in_the_folder_of_its_sweep(folder: Folder, name: str) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.subdir: .* is not a folder in hydra\.sweep\.dir"):
        begin_trial(folder, name, ["model.units=4"], 0)


def test_the_table_has_the_best_first_and_what_failed(folder: Folder) -> None:
    add(folder, 0, {"recipe": "mnist", "cluster": "1ps1w", "optimizer.learning_rate": "0.1"}, result(0.7, 0.8))
    add(folder, 1, {"recipe": "mnist", "cluster": "1ps2w", "optimizer.learning_rate": "0.1"}, result(0.2, 0.9))
    add(folder, 2, {"recipe": "mnist", "cluster": "1ps2w", "optimizer.learning_rate": "9"}, None, status="failed",
        error="NanTensor: the loss became nan\nmore", exit_code=1)  # fmt: skip
    add(folder, 10, {"recipe": "mnist", "cluster": "1ps1w", "optimizer.learning_rate": "9"}, None)
    folder.write("notes/trial.json", b"{}")
    folder.write("3/result.json", b"{}")
    sweep = Sweep(folder)
    assert [job.number for job in sweep.trials] == [0, 1, 2, 10]
    assert sweep.swept == ["cluster", "optimizer.learning_rate"]
    heads, rule, *rows, failed = sweep.table()
    assert [head.strip() for head in heads.split(" | ")[:2]] == ["status", "trial"]
    assert set(rule) <= {"-", "+"}
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert cells == [
        ["done", "1", "30", "0.2000", "100.0", "1ps2w", "0.1"],
        ["done", "0", "30", "0.7000", "100.0", "1ps1w", "0.1"],
        ["failed", "2", "", "", "", "1ps2w", "9"],
        ["unfinished", "10", "", "", "", "1ps1w", "9"],
    ]
    assert failed == "trial 2 failed: NanTensor: the loss became nan"
    assert [group.rows[0]["run"] for group in Sweep(folder, "accuracy").groups()[:2]] == ["1", "0"]
    sweep.write()
    assert (folder.read("sweep.txt") or b"").decode().splitlines() == sweep.table()
    assert (picture_of(sweep) or b"").startswith(PNG)


def test_seeds_are_one_row_with_mean_and_spread(folder: Folder) -> None:
    accuracies = {"1ps1w": (0.8, 0.9, 1.0), "1ps2w": (0.7, 0.7, None)}
    for number, (cluster, seed) in enumerate(itertools.product(accuracies, range(3))):
        accuracy = accuracies[cluster][seed]
        found = None if accuracy is None else result(1.0, accuracy, cluster=cluster, seed=seed)
        status = {} if found else {"status": "failed", "error": "no"}
        add(folder, number, {"cluster": cluster, "run.seed": str(seed), "train.steps": "9"}, found, **status)
    sweep = Sweep(folder, "accuracy")
    assert sweep.swept == ["cluster", "run.seed"]
    heads, _, *rows, failed = sweep.table()
    assert [[cell.strip() for cell in row.split("|")] for row in [heads, *rows]] == [
        ["status", "trial", "step", "accuracy", "steps/s", "cluster", "run.seed"],
        ["done", "0-2", "30", "0.9000 ± 0.10", "100.0 ± 0.0", "1ps1w", "0-2"],
        ["2 done, 1 failed", "3-5", "30", "0.7000 ± 0.0", "100.0 ± 0.0", "1ps2w", "0-2"],
    ]
    assert failed == "trial 5 failed: no"


def axes_of(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of the picture of a sweep."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    picture_of(sweep)
    return [axes for axes in figures[0].axes if axes.axison]


def lines_joined(axes: Axes) -> list[bool]:
    return [line.get_linestyle() not in ("None", "none", "") for line in axes.lines]


def test_categories_are_points_and_numbers_are_lines_in_bands(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (("1ps1w", "1ps2w", "2ps2w"), ("0.1", "0.01", "1.0"), ("1", "2"))
    for number, (cluster, rate, seed) in enumerate(itertools.product(*keys)):
        found = result(1.0, 0.9 + 0.001 * int(seed), cluster=cluster, seed=int(seed))
        add(folder, number, {"cluster": cluster, "optimizer.learning_rate": rate, "run.seed": seed}, found)
    metric, rate_axes, staleness, over_rate = axes_of(Sweep(folder, "accuracy"), monkeypatch)
    for axes in (metric, rate_axes, staleness):
        assert [tick.get_text() for tick in axes.get_xticklabels()] == list(keys[0])
        assert not any(lines_joined(axes))
        # Mean and deviation of each rate.
        assert len(axes.containers) == 3
    assert [axes.get_ylabel() for axes in (rate_axes, staleness)] == ["examples/s", "staleness, mean"]
    assert rate_axes.get_ylim()[0] == staleness.get_ylim()[0] == 0
    # It would hide all differences, so the axis says that it is cut.
    assert metric.get_ylabel() == "accuracy  (axis does not begin at 0)"
    assert lines_joined(over_rate) == [True] * 3
    assert [list(line.get_xdata()) for line in over_rate.lines] == [[0.01, 0.1, 1.0]] * 3
    assert (len(over_rate.collections), over_rate.get_xscale()) == (3, "log")
    for axes in (metric, over_rate):
        # The legend is above what is drawn.
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1
    assert axes.get_legend().get_title().get_text() == "cluster"


def test_a_loss_that_differs_much_begins_at_0_and_seeds_alone_are_points(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, seed in enumerate("123"):
        add(folder, number, {"run.seed": seed}, result(float(seed), 0.5, seed=int(seed)))
    (axes,) = axes_of(Sweep(folder), monkeypatch)
    assert (axes.get_ylabel(), axes.get_ylim()[0], axes.get_xlabel()) == ("loss", 0, "run.seed")
    assert not any(lines_joined(axes))


@pytest.mark.parametrize("keys", [("cluster",), ("model.units",), ("cluster", "model.units")])
def test_a_single_run_has_no_deviation(keys: tuple[str, ...], folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"cluster": ("1ps1w", "1ps2w"), "model.units": ("8", "16")}
    for number, chosen in enumerate(itertools.product(*(values[key] for key in keys))):
        given = dict(zip(keys, chosen))
        # Each size is another model, but on one line.
        found = result(1.0 + number, 0.5, cluster=given.get("cluster"), config={"model": {"units": chosen[-1]}})
        add(folder, number, given, found)
    for axes in axes_of(Sweep(folder), monkeypatch):
        assert not axes.containers
        assert not axes.collections
        assert {len(line.get_xdata()) for line in axes.lines} == {2}
        assert len(axes.lines) == 2 ** (len(keys) - 1)


def test_forty_jobs_have_names_that_can_be_read_and_no_mean_over_other_settings(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [f"a.package.with.a.long.name.build_{number}" for number in range(10)]
    for number, (model, units) in enumerate(itertools.product(models, "1234")):
        add(folder, number, {"model._target_": model, "model.units": units}, result(1.0 + number, 0.5))
    over_models, over_units = axes_of(Sweep(folder), monkeypatch)
    labels = over_models.get_xticklabels()
    assert [label.get_text()[-7:] for label in labels] == [f"build_{number}" for number in range(10)]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    # Ten lines could not be told apart.
    assert over_units.get_legend() is None
    (points,) = over_units.lines
    assert (lines_joined(over_units), len(points.get_xdata())) == ([False], 40)


def test_a_sweep_without_a_job_that_is_done_has_a_table_and_no_picture(folder: Folder) -> None:
    add(folder, 0, {"cluster": "local"}, None, status="failed", error="no", exit_code=2)
    sweep = Sweep(folder)
    sweep.write()
    assert picture_of(sweep) is None
    assert b"trial 0 failed: no" in (folder.read("sweep.txt") or b"")


def test_what_a_sweep_has_written_is_there_for_processes_of_a_launcher(folder: Folder) -> None:
    add(folder, 0, {"cluster": "local"}, result(1, 0))
    received = pickle.loads(pickle.dumps(folder))
    assert str(received) == str(folder)
    found = Trial.read(received, "0")
    assert found is not None
    assert found.result["status"] == "done"


def test_files_of_hydra_are_brought_to_a_sweep_on_object_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folder_at(f"file://{tmp_path}/sweep", 1.0)
    # Nothing was written here yet.
    bring_files(folder)
    (folder.path / "0").mkdir(parents=True)
    (folder.path / "multirun.yaml").write_text("hydra: {}")
    bring_files(folder)
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["multirun.yaml"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://key:hunter2@bucket/sweep", r"hydra\.sweep\.dir=s3://\*\*\*: has a user"),
        ("az://bucket/sweep", r"hydra\.sweep\.dir=az://bucket/sweep: unknown protocol az; choose one of s3, gs"),
        (
            "gs://bucket/sweep",
            r"hydra\.sweep\.dir=gs://bucket/sweep: needs the package gcsfs: pip install 'gcsfs>=2024.6'",
        ),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_once(
    place: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=f"^{message}"):
        folder_at(place, 1.0, "hydra.sweep.dir")
