"""Runs as rows: what is found below a folder, what is refused, and how seeds are grouped."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import kdist
from kdist.cli.main import run
from kdist.errors import ConfigError
from kdist.run.metrics_file import MetricsFile
from kdist.sweeps.groups import Group, Spread, cells, list_text, number_text, table
from kdist.sweeps.load import MODEL, runs_below

COLUMNS = ["run", "status", "strategy", "cluster", "seed"]
SPEED = ["steps_per_second", "examples_per_second", "staleness", "seconds", "global_step", "workers"]


def record(accuracy: float | None = 0.9, **more: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "status": "done",
        "strategy": "parameter_server",
        "cluster": "1ps1w",
        "seed": 1,
        "metrics": {"train": {"loss": 0.5, "f1": [0.25, 0.75]}, "validation": {"accuracy": accuracy}},
        "best": {"accuracy": {"value": accuracy, "step": 9, "mode": "max"}},
        "steps_per_second": 100.0,
        "gradients": {"staleness_mean": 1.5},
        "global_step": 10,
        "overrides": [],
        "config": {},
        **more,
    }


def add(folder: Path, found: Any, name: str = "result.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(found if isinstance(found, str) else json.dumps(found))


def loaded(folder: object, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = kdist.load_runs(folder)  # type: ignore[arg-type]
    assert isinstance(rows, list)
    return rows


def test_one_row_for_each_run_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"optimizer": {"learning_rate": 0.1}, "run": {"seed": None}}
    add(tmp_path / "mnist" / "10", record(overrides=["+recipe=mnist", "cluster=1ps1w"], config=config))
    add(tmp_path / "mnist" / "9", record(overrides=["optimizer.learning_rate=0.5", "run.dir=D"], seed=7))
    # What is in a run dir belongs to the run.
    add(tmp_path / "mnist" / "9" / "best", record())
    add(tmp_path / "notes", {"mine": True}, "other.json")
    rows = loaded(tmp_path, monkeypatch)
    metrics = ["train/loss", "train/f1/0", "train/f1/1", "validation/accuracy", "best/accuracy"]
    assert [list(row) for row in rows] == [[*COLUMNS, "optimizer.learning_rate", "recipe", *metrics, *SPEED]] * 2
    assert [(row["run"], row["seed"]) for row in rows] == [("mnist/9", 7), ("mnist/10", 1)]
    # Of a run that does not override a key it is the value of its config.
    assert [row["optimizer.learning_rate"] for row in rows] == [0.5, 0.1]
    assert [row["recipe"] for row in rows] == [None, "mnist"]
    assert {name: rows[0][name] for name in ("train/f1/1", "best/accuracy", "staleness", "workers")} == {
        "train/f1/1": 0.75, "best/accuracy": 0.9, "staleness": 1.5, "workers": None,
    }  # fmt: skip
    # The folder may be the run dir.
    assert [row["run"] for row in loaded(tmp_path / "mnist" / "9", monkeypatch)] == ["9"]


def test_with_pandas_it_is_a_data_frame(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    add(tmp_path / "1", record(overrides=["run.seed=1"]))
    add(tmp_path / "2", record(None, overrides=["run.seed=2"], seed=2))
    frame = kdist.load_runs(tmp_path)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["run.seed"]) == [1, 2]
    assert frame["best/accuracy"].isna().tolist() == [False, True]


def test_runs_from_python_have_columns_for_what_differs_and_for_hyperparameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        config = {
            "train": {"batch_size": 16 * number, "steps": 100},
            "run": {"seed": number, "dir": str(number)},
            "cluster": {"shape": f"1ps{number}w"},
            "hparams": {"units": 8},
        }
        add(tmp_path / str(number), record(config=config, cluster=f"1ps{number}w", seed=number))
    rows = loaded(tmp_path, monkeypatch)
    assert list(rows[0])[: len(COLUMNS) + 2] == [*COLUMNS, "train.batch_size", "units"]
    assert [(row["train.batch_size"], row["units"], row["cluster"]) for row in rows] == [
        (16, 8, "1ps1w"),
        (32, 8, "1ps2w"),
    ]
    assert "train/loss" in rows[0]


def test_a_run_without_a_result_has_its_newest_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / "killed")
    file.append({"step": 10, "epoch": 0, "kind": "train", "seconds": 2.0, "steps_per_second": 5.0}, {"loss": 1.0})
    file.append({"step": 20, "epoch": 0, "kind": "validation", "seconds": 3.0}, {"val_loss": 0.5})
    with file.path.open("a") as end:
        end.write("30,0,tra")
    add(tmp_path / "trial", {"overrides": {"cluster": "2ps2w", "run.seed": "3"}, "status": "running"}, "trial.json")
    killed, trial = loaded(tmp_path, monkeypatch)
    assert {name: killed[name] for name in ("status", "train/loss", "validation/loss", "global_step")} == {
        "status": "unfinished", "train/loss": 1.0, "validation/loss": 0.5, "global_step": 20,
    }  # fmt: skip
    assert (killed["seconds"], killed["steps_per_second"]) == (3.0, 5.0)
    assert (trial["status"], trial["cluster"], trial["seed"], trial["run.seed"]) == ("unfinished", "2ps2w", 3, 3)


def test_runs_on_object_storage() -> None:
    files = MemoryFileSystem()
    try:
        for name in ("s/2", "s/10", "s/2/best", "one"):
            files.pipe(f"/bucket/{name}/result.json", json.dumps(record()).encode())
        assert [row["run"] for row in runs_below("memory://bucket/s").rows] == ["2", "10"]
        assert [row["run"] for row in runs_below("memory://bucket/one").rows] == ["one"]
    finally:
        MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.txt", "", r": no run is there: neither it nor a folder in it has a result\.json of kdist"),
        (
            "result.json",
            {"format": 2, "status": "done", "versions": {"kdist": "9.1"}},
            r"/1/result\.json: was written by kdist 9\.1, in format 2; this version reads format 1",
        ),
        (
            "metrics.csv",
            "step,epoch,kind\n10,0\n20,0,train\n",
            r"/1/metrics\.csv: line 2 is damaged: it has 2 of 3 values",
        ),
    ],
)
def test_what_cannot_be_read_is_one_message(
    name: str, content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(tmp_path / "1", content, name)
    with pytest.raises(ConfigError, match=message):
        kdist.load_runs(tmp_path)
    assert run(["runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kdist: error: ")
    assert error.count("\n") == 1


def test_a_folder_that_is_not_there_and_a_column_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err
    add(tmp_path / "1", record())
    assert run(["runs", str(tmp_path), "--group-by", "strategy,flavour"]) == 2
    assert "--group-by flavour: there is no such column; choose from run, status, " in capsys.readouterr().err
    assert run(["runs", str(tmp_path), "--sort", "best/auc"]) == 2
    assert "--sort best/auc: there is no such column; " in capsys.readouterr().err
    assert run(["runs", str(tmp_path), "--columns", "run,accuracy"]) == 2
    error = capsys.readouterr().err
    assert "--columns accuracy: there is no such column; did you mean validation/accuracy or best/accuracy?" in error
    assert run(["runs", str(tmp_path), "--sort", "-statsu"]) == 2
    assert "--sort statsu: there is no such column; did you mean status?" in capsys.readouterr().err


def test_a_record_of_something_else_is_left_out_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path / "1", record())
    add(tmp_path / "2", {"score": 1})
    with pytest.warns(UserWarning, match=r"2/result\.json: is not the record of a run; left out"):
        assert [row["run"] for row in loaded(tmp_path, monkeypatch)] == ["1"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    found = {"1ps1w": (0.8, 0.9, 1.0), "1ps2w": (0.95, 0.97, None)}
    for cluster, accuracies in found.items():
        for seed, accuracy in enumerate(accuracies):
            failed = {"status": "failed", "error": "the loss\nbecame NaN", "metrics": {}, "best": {}}
            more = failed if accuracy is None else {}
            overrides = [f"cluster={cluster}", f"run.seed={seed}", "train.steps=9"]
            add(
                tmp_path / f"{cluster}-{seed}",
                record(accuracy, cluster=cluster, seed=seed, overrides=overrides, **more),
            )
    return tmp_path


def cells_of(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of the table that was printed, with its heads, without its rule."""
    lines = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_table_has_the_state_the_metric_and_what_differs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(sweep), "--sort", "-best/accuracy"]) == 0
    heads, rule, *rows, failed = capsys.readouterr().out.splitlines()
    assert set(rule) <= {"-", "+"}
    assert [[cell.strip() for cell in line.split("|")] for line in [heads, *rows]] == [
        ["status", "run", "step", "best/accuracy", "steps/s", "cluster", "seed"],
        ["2 done, 1 failed", "1ps2w-0 +2", "10", "0.9600 ± 0.014", "100.0 ± 0.0", "1ps2w", "0-2"],
        ["done", "1ps1w-0 +2", "10", "0.9000 ± 0.10", "100.0 ± 0.0", "1ps1w", "0-2"],
    ]
    assert failed == "1ps2w-2 failed: the loss"


def test_columns_and_their_order_can_be_chosen(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--columns", "cluster,train/loss,step", "--group-by", "cluster,run.seed"]
    assert run(["runs", str(sweep), *chosen, "--sort", "-cluster"]) == 0
    heads, *rows = cells_of(capsys)
    assert heads == ["cluster", "train/loss", "step"]
    assert [row[0] for row in rows] == ["1ps2w"] * 3 + ["1ps1w"] * 3
    # A value that is missing is last, also then.
    for sort in ("best/accuracy", "-best/accuracy"):
        run(["runs", str(sweep), "--columns", "run,best/accuracy", "--group-by", "run", "--sort", sort])
        _, *rows = cells_of(capsys)
        found = [row[1] for row in rows[:-1]]
        assert found == sorted(found, reverse=sort.startswith("-"))
        assert rows[-1][0] == "1ps2w-2"


@pytest.mark.parametrize("is_from_python", [False, True])
def test_no_mean_is_over_runs_of_different_models_or_losses(
    is_from_python: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ("mine.small", "mine.large", "mine.small", "mine.small")
    for number, (model, loss) in enumerate(zip(models, ("mse", "mse", "mae", "mse"))):
        of_python = {"hparams": {}, "fit": {"model": model, "loss": loss}}
        config = of_python if is_from_python else {"model": {"_target_": model}, "loss": loss}
        add(tmp_path / str(number), record(0.5 + number / 10, seed=number, config=config))
    run(["runs", str(tmp_path), "--columns", "run,best/accuracy"])
    _, *rows = cells_of(capsys)
    assert rows == [["0,3", "0.6500 ± 0.21"], ["1", "0.6000"], ["2", "0.7000"]]
    # A column of the command's own, which a list of rows would show.
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert all(MODEL not in row for row in kdist.load_runs(tmp_path))  # type: ignore[operator]


@pytest.mark.parametrize("width", [80, 50, 5])
def test_a_table_has_the_first_columns_that_fit_and_names_the_others(width: int) -> None:
    columns = {
        "status": ["done", "failed"],
        "loss": ["0.5000 ± 0.1", "0.3000"],
        "optimizer.learning_rate": ["0.1", "0.01"],
        "model._target_": ["a.very.long.name.of.a.function", "another"],
        "run.seed": ["1", "2"],
    }
    lines = table(columns, width, "more")
    heads = [head.strip() for head in lines[0].split(" | ")]
    left_out = [name for name in columns if not {name, name.rpartition(".")[2]} & set(heads)]
    assert " ".join(lines[4:]) == (
        f"{len(left_out)} of 5 columns left out: {', '.join(left_out)}; more" if left_out else ""
    )
    assert {80: 5, 50: 4, 5: 1}[width] == len(heads)
    assert all(len(line) <= width for line in lines) or width == 5
    # Nothing is cut in a pipe.
    assert len(table(columns)[0].split(" | ")) == len(columns)


def test_digits_of_a_column_are_even_and_numbers_end_at_the_same_place() -> None:
    assert [number_text(value) for value in (0.9, 2.0024, 111, 12345.6, 0, 3e-7, 5e9)] == [
        "0.9000", "2.002", "111.0", "12346", "0.000", "3.000e-07", "5.000e+09",
    ]  # fmt: skip
    groups = [Group({}, [{"status": "done", "best/x": value} for value in values]) for values in ([0.5, 0.7], [12], [])]
    assert cells(groups, "best/x") == ["0.6000 ± 0.14", " 12.00       ", ""]


def test_the_table_as_csv_by_other_keys(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(sweep), "--csv", "--group-by", "strategy,run.seed"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["strategy"], row["run.seed"], row["runs"], row["done"]) for row in rows] == [
        ("parameter_server", "0", "2", "2"),
        ("parameter_server", "1", "2", "2"),
        ("parameter_server", "2", "2", "1"),
    ]
    assert float(rows[0]["best/accuracy"]) == pytest.approx(0.875)
    assert float(rows[0]["best/accuracy deviation"]) == pytest.approx(0.10607, rel=1e-3)
    assert (rows[2]["best/accuracy"], rows[2]["best/accuracy deviation"]) == ("1.0", "")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([2, 1], "1,2"),
        ([1, 2, 3, 7], "1-3,7"),
        ([0.5, 0.1], "0.5,0.1"),
        (["a", None, "b"], "a,b"),
        (["mnist/2026-11-21", "mnist/2026-11-22", "mnist/2026-11-23"], "mnist/2026-11-21 +2"),
        ([738291, 182738, 928374], "738291 +2"),
    ],
)
def test_values_of_a_row(values: list[Any], text: str) -> None:
    assert list_text(values) == text


def test_spreads() -> None:
    def of(*values: float | None) -> Group:
        return Group({}, [{"status": "done", "x": value} for value in values])

    assert of(None, float("nan")).spread("x") is None
    assert of(2.0).spread("x") == Spread(2.0, None)
    assert of(1.0, 3.0).spread("x") == Spread(2.0, pytest.approx(1.414, rel=1e-3))
