"""`metrics.csv`: whole lines, whatever happens to the process, the disk or the columns."""

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import ended_process, held_by, write_lock

from kdist.errors import ConfigError
from kdist.run.metrics_file import COLUMNS, Epoch, MetricsFile, epochs_of, metrics_of, read_rows


def values(step: int, kind: str = "train", epoch: int = 0, **others: Any) -> dict[str, Any]:
    return {"step": step, "epoch": epoch, "kind": kind, "seconds": step / 10, **others}


@pytest.fixture
def file(tmp_path: Path) -> MetricsFile:
    found = MetricsFile(tmp_path)
    assert found.begin(0) == []
    assert not found.path.exists()
    return found


def test_what_is_written_is_read(file: MetricsFile) -> None:
    file.append(
        values(10, learning_rate=0.1, staleness=None), {"loss": 0.1 + 0.2, "f1": np.array([0.5, np.nan], np.float32)}
    )
    file.append(values(10, "validation"), {"val_loss": float("inf")})
    first, second = read_rows(file.path.parent)
    assert {k: v for k, v in first.items() if k != "f1"} == {**values(10, learning_rate=0.1), "loss": 0.1 + 0.2}
    np.testing.assert_array_equal(first["f1"], np.array([0.5, np.nan], np.float32), strict=True)
    assert second == {**values(10, "validation"), "val_loss": float("inf")}


def test_a_new_column_widens_the_file_and_training_comes_before_validation(file: MetricsFile) -> None:
    file.append(values(5, "validation"), {"val_loss": 2.0})
    file.append(values(10), {"loss": 1.0})
    file.append(values(20), {"loss": 0.5, "added, later": 7.0})
    file.append(values(30), {"loss": 0.25})
    with file.path.open() as lines:
        heads, *rows = csv.reader(lines)
    assert heads == [*COLUMNS, "loss", "added, later", "val_loss"]
    assert [row[len(COLUMNS) :] for row in rows] == [
        ["", "", "2.0"],
        ["1.0", "", ""],
        ["0.5", "7.0", ""],
        ["0.25", "", ""],
    ]
    assert [path.name for path in file.path.parent.iterdir()] == ["metrics.csv"]


def test_half_a_line_counts_as_not_written(file: MetricsFile) -> None:
    for step in (10, 20):
        file.append(values(step), {"loss": 1.0})
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-4])
    assert [row["step"] for row in read_rows(file.path.parent)] == [10]
    again = MetricsFile(file.path.parent)
    assert [row["step"] for row in again.begin(20)] == [10]
    again.append(values(20), {"loss": 1.0})
    assert file.path.read_bytes() == whole
    # Not even the first line is whole.
    file.path.write_bytes(b"step,epo")
    assert read_rows(file.path.parent) == again.begin(20) == []


def test_a_resumed_run_forgets_rows_of_later_steps(file: MetricsFile) -> None:
    for step in (10, 20, 30):
        file.append(values(step), {"loss": float(step)})
    again = MetricsFile(file.path.parent)
    assert [row["step"] for row in again.begin(20)] == [10, 20]
    again.append(values(25), {"loss": 25.0})
    assert [row["loss"] for row in read_rows(file.path.parent)] == [10.0, 20.0, 25.0]
    # Nothing changes if there is nothing to forget.
    before = file.path.read_bytes()
    again.begin(25)
    assert file.path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,epoch,kind\n1,0,train\n2,0\n3,0,train\n", "line 3 is damaged: it has 2 of 3 values"),
        ("step,epoch,kind\n1,0,train\nx,0,train\n", "line 3 is damaged: x,0,train"),
        ("step,epoch,kind,loss\n1,0,train,[0.5\n", r"line 2 is damaged: 1,0,train,\[0.5"),
        ("step,epoch,kind\n,0,train\n", "line 2 is damaged: ,0,train"),
        ("a,b\n1,2\n", "is no metrics.csv of kdist: its first line has no step, epoch and kind"),
        ("step,epoch,kind\n\udcff,0,train\n", "is damaged: 'utf-8' codec"),
    ],
)
def test_a_damaged_file_is_an_error_for_readers_and_set_aside_by_a_run(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"metrics\.csv: {message}"):
        read_rows(tmp_path)
    file = MetricsFile(tmp_path)
    with pytest.warns(UserWarning, match=r"damaged.*; it is metrics-damaged\.csv now|is no metrics.csv"):
        assert file.begin(5) == []
    file.append(values(6), {"loss": 1.0})
    assert [row["step"] for row in read_rows(tmp_path)] == [6]
    assert (tmp_path / "metrics-damaged.csv").exists()


def test_a_full_disk_costs_one_warning_and_rows_continue_when_there_is_room(
    file: MetricsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.append(values(10), {"loss": 1.0})

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        patched.setattr(Path, "write_text", full)
        with pytest.warns(UserWarning, match=r"metrics\.csv: cannot be written: No space left.*continues"):
            file.append(values(20), {"loss": 1.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            file.append(values(30), {"loss": 1.0})
    # As much of a line as there was room for.
    with file.path.open("ab") as end:
        end.write(b"40,0,tr")
    file.append(values(50), {"loss": 1.0})
    assert [row["step"] for row in read_rows(file.path.parent)] == [10, 50]


def test_a_chief_that_was_replaced_writes_no_more(run_dir: Path) -> None:
    write_lock(run_dir, held_by(pid=ended_process()))
    with pytest.raises(ConfigError, match="was taken over by"):
        MetricsFile(run_dir).append(values(10), {"loss": 1.0})
    assert not (run_dir / "metrics.csv").exists()


def test_a_metric_may_have_the_name_of_a_column_and_thousands_of_values(file: MetricsFile) -> None:
    matrix = np.full((200, 100), 0.123456789, np.float32)
    file.append(values(10), {"seconds": 3.0, "matrix": matrix})
    (row,) = read_rows(file.path.parent)
    assert row["seconds"] == 1.0
    assert metrics_of(row).keys() == {"seconds", "matrix"}
    np.testing.assert_array_equal(row["matrix"], matrix, strict=True)


def test_the_epochs_of_history_are_rebuilt() -> None:
    rows = [
        values(10, "epoch", 0, learning_rate=0.1, loss=5.0),
        values(10, "validation", 0, val_loss=6.0),
        values(15, "epoch", 1, learning_rate=0.1, loss=4.0),
        values(20, "epoch", 1, learning_rate=0.2, loss=3.0, val_loss=2.5),
        values(30, "epoch", 2, loss=1.0),
    ]
    assert epochs_of(rows, after=0, until=20) == [
        Epoch(10, 0, {"loss": 5.0}),
        # The one that was stopped in its middle counts once.
        Epoch(20, 1, {"loss": 3.0, "val_loss": 2.5}),
    ]
    assert [epoch.step for epoch in epochs_of(rows, after=10, until=99, are_complete=False)] == [15, 20, 30]
    assert epochs_of(rows, after=0, until=10, with_learning_rate=True) == [
        Epoch(10, 0, {"loss": 5.0, "learning_rate": 0.1})
    ]
