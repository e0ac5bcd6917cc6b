"""Files that keep arriving: which ones count, how their records are read, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import counted
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from helpers import in_short, result_of

import kdist
from kdist.data.base import make_dataset, worker_dataset
from kdist.data.sources import training_data
from kdist.data.splits import NothingToRead, UnreadableSplit
from kdist.errors import ConfigError, TaskError
from kdist.extras.arriving_files import ArrivingFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "incoming").mkdir()
    return tmp_path / "incoming"


def arriving(folder: Path, pattern: str = "*.parquet", **arguments: Any) -> ArrivingFiles:
    if "columns" not in arguments and ".csv" in pattern:
        arguments["columns"] = counted.COLUMNS
    parse = counted.parse_record if "tfrecord" in pattern else counted.parse
    return kdist.arriving_files(folder, pattern, parse, **{"poll_secs": 0.02, **arguments})


def fit(source: ArrivingFiles, run_dir: Path, **arguments: Any) -> kdist.Trainer:
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir)
    trainer.fit(source, batch_size=10, verbose=0, **arguments)
    return trainer


def trained_on(trainer: kdist.Trainer) -> dict[int, int]:
    return {number: int(count) for number, count in enumerate(counted.counts(trainer.model)) if count}


def once(*numbers: int) -> dict[int, int]:
    return dict.fromkeys(numbers, 1)


@pytest.mark.parametrize("suffix", in_short([".parquet", ".csv", ".tfrecord"], {".csv", ".tfrecord"}))
def test_every_record_of_every_file_is_trained_on_once(folder: Path, run_dir: Path, suffix: str) -> None:
    for i in range(3):
        counted.write_file(folder / f"{i}{suffix}", range(100 * i, 100 * i + 25))
    (folder / "_END").touch()
    trainer = fit(arriving(folder, f"*{suffix}"), run_dir)
    assert trained_on(trainer) == once(*range(25), *range(100, 125), *range(200, 225))
    result = result_of(run_dir)
    # Two full batches of each file and one of 5.
    assert (result["global_step"], result["examples"], result["extra_steps"]) == (9, 75, 0)
    assert result["stopped_by"] == str(folder / "_END")


@pytest.mark.parametrize("suffix", in_short([".parquet", ".csv.gz", ".tfrecord.gz"], {".parquet"}))
def test_a_resumed_run_continues_in_the_middle_of_a_file(folder: Path, run_dir: Path, suffix: str) -> None:
    for i in range(2):
        counted.write_file(folder / f"{i}{suffix}", range(100 * i, 100 * i + 35))
    (folder / "_END").touch()
    source = arriving(folder, f"*{suffix}")
    assert trained_on(fit(source, run_dir, steps=2)) == once(*range(20))
    # Another process, and another size of the batches.
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir)
    trainer.fit(source, batch_size=7, verbose=0)
    assert trained_on(trainer) == once(*range(35), *range(100, 135))


def test_a_file_that_was_trained_on_to_its_end_is_not_read_again(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.csv", range(20))
    source = arriving(folder, "*.csv")
    # The step that ends the run is the last one of the file, which is not known then.
    fit(source, run_dir, steps=2)
    counted.write_file(folder / "1.csv", range(100, 120))
    (folder / "_END").touch()
    assert trained_on(fit(source, run_dir)) == once(*range(20), *range(100, 120))


def test_a_second_fit_of_a_trainer_continues_with_the_data(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.csv", range(40))
    (folder / "_END").touch()
    trainer = fit(arriving(folder, "*.csv"), run_dir, steps=2)
    trainer.fit(arriving(folder, "*.csv"), batch_size=10, steps=3, verbose=0)
    assert trained_on(trainer) == once(*range(30))
    trainer.fit(arriving(folder, "*.csv"), batch_size=10, verbose=0)
    assert trained_on(trainer) == once(*range(40))


def test_a_run_that_starts_over_reads_everything(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.csv", range(20))
    (folder / "_END").touch()
    fit(arriving(folder, "*.csv"), run_dir)
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir, resume="never")
    trainer.fit(arriving(folder, "*.csv"), batch_size=10, verbose=0)
    assert trained_on(trainer) == once(*range(20))


def test_files_that_are_not_complete_are_passed_over(folder: Path) -> None:
    for name in (".a.csv", "_b.csv", "c.csv.tmp", "d.txt", "e.csv", "f.csv"):
        (folder / name).touch()
    (folder / "g.csv").mkdir()
    found = arriving(folder, "*.csv").enumerator()
    assert found.discover() == ["e.csv", "f.csv", "g.csv"]
    (folder / ".a.csv").rename(folder / "a.csv")
    assert found.discover() == ["a.csv"]
    assert found.discover() == []
    with pytest.raises(UnreadableSplit, match="it is no file"):
        found.check("g.csv")


def test_the_end_counts_when_the_folder_was_listed_after_it(folder: Path) -> None:
    found = arriving(folder, "*.csv").enumerator()
    (folder / "_END").touch()
    assert found.discover() == []
    assert found.ended_by is None
    (folder / "a.csv").touch()
    assert found.discover() == ["a.csv"]
    assert found.ended_by == str(folder / "_END")


def test_a_folder_without_new_files_ends_the_run_after_idle_secs(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.csv", range(20))
    trainer = fit(arriving(folder, "*.csv", idle_secs=0.2, poll_secs=0.05), run_dir)
    assert trained_on(trainer) == once(*range(20))
    assert trainer.result.stopped_by == f"{folder}/*.csv, where nothing arrived for 0.2 s"


def test_a_checkpoint_is_saved_while_the_run_waits(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.csv", range(20))
    clock = iter(range(1000))
    saver = kdist.hooks.CheckpointSaver(every_secs=5, clock=lambda: next(clock))
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir, hooks=[saver])
    with trainer.session(arriving(folder, "*.csv", poll_secs=0.01), batch_size=10, verbose=0) as session:
        while not session.checkpoints.steps()[-1]:
            session.run()
        assert session.checkpoints.steps()[-1] == session.global_step == 2
        assert session.run() is None


def test_files_that_cannot_be_read_cost_a_warning_each(folder: Path, run_dir: Path) -> None:
    for i in range(3):
        counted.write_file(folder / f"{i}.parquet", range(100 * i, 100 * i + 20))
    content = (folder / "2.parquet").read_bytes()
    (folder / "1.parquet").write_bytes(b"no Parquet")
    # The footer, which the chief reads, is whole; what the worker reads is not.
    (folder / "2.parquet").write_bytes(content[:4] + bytes(60) + content[64:])
    (folder / "_END").touch()
    with pytest.warns(UserWarning, match="cannot be read and is skipped") as caught:
        trainer = fit(arriving(folder), run_dir)
    told = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
    assert [line.partition(": ")[2].partition(":")[0] for line in told] == ["1.parquet", "2.parquet"]
    assert "not a parquet file" in told[0]
    assert "Traceback" not in told[1]
    assert trained_on(trainer) == once(*range(20))


def test_a_file_that_is_torn_is_read_up_to_there(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.tfrecord", range(35))
    content = (folder / "0.tfrecord").read_bytes()
    (folder / "0.tfrecord").write_bytes(content[:-10])
    counted.write_file(folder / "1.tfrecord", range(100, 110))
    (folder / "_END").touch()
    with pytest.warns(UserWarning, match=r"0.tfrecord: what follows 30 records cannot be read and is skipped: \S"):
        trainer = fit(arriving(folder, "*.tfrecord"), run_dir)
    assert trained_on(trainer) == once(*range(30), *range(100, 110))


@pytest.mark.parametrize("damage", [slice(0, 2), slice(10, 30), slice(12, None)])
def test_a_compressed_file_that_is_damaged_is_skipped(folder: Path, damage: slice) -> None:
    counted.write_file(folder / "0.csv.gz", range(5))
    content = bytearray((folder / "0.csv.gz").read_bytes())
    content[damage] = bytes(255 - byte for byte in content[damage])
    (folder / "0.csv.gz").write_bytes(content)
    data = training_data(arriving(folder, "*.csv.gz"), batch_size=10)
    assert data.splits is not None
    assert data.splits.look()
    with pytest.warns(UserWarning, match="0.csv.gz: cannot be read and is skipped"), pytest.raises(NothingToRead):
        data.arguments(0, 1)


def test_a_file_that_is_removed_before_its_turn_is_skipped(folder: Path) -> None:
    counted.write_file(folder / "0.csv", range(5))
    data = training_data(arriving(folder, "*.csv"), batch_size=10)
    assert data.splits is not None
    assert data.splits.look()
    (folder / "0.csv").unlink()
    with pytest.warns(UserWarning, match="0.csv: cannot be read and is skipped"), pytest.raises(NothingToRead):
        data.arguments(0, 1)


def write_table(path: Path, **columns: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"number": ["1"], "label": np.ones(1, np.float32)},
            "b.parquet: column number is string, and a.parquet has int64; all files need one schema",
        ),
        (
            {"number": [1]},
            "b.parquet: has no column label, for which a.parquet has float; it has number",
        ),
        (
            {"number": [1], "label": np.ones(1, np.float32), "more": [1]},
            "b.parquet: column more is int64, and a.parquet has no such column; all files need one schema, or give "
            "columns",
        ),
    ],
)
def test_a_schema_that_changes_is_an_error_with_file_column_and_types(
    folder: Path, run_dir: Path, second: dict[str, Any], message: str
) -> None:
    counted.write_file(folder / "a.parquet", range(30))
    write_table(folder / "b.parquet", **second)
    with pytest.raises(ConfigError) as raised:
        fit(arriving(folder), run_dir)
    assert str(raised.value) == f"{folder}/{message}"
    assert raised.value.exit_code == 2


def test_columns_that_are_given_are_all_that_counts(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "a.parquet", range(5))
    write_table(folder / "b.parquet", more=[["x"]], label=np.ones(1, np.float32), number=[7])
    (folder / "_END").touch()
    trainer = fit(arriving(folder, columns=counted.COLUMNS), run_dir)
    assert trained_on(trainer) == once(0, 1, 2, 3, 4, 7)
    write_table(folder / "c.parquet", number=[1.0], label=[1.0])
    with pytest.raises(ConfigError, match="c.parquet: column number is double, and columns says int64"):
        fit(arriving(folder, columns=counted.COLUMNS), run_dir)


def test_what_parquet_columns_become(folder: Path) -> None:
    table = {
        "flag": pyarrow.array([True, False]),
        "half": pyarrow.array(np.array([1, 2], np.float16)),
        "small": pyarrow.array([1, 2], pyarrow.uint8()),
        "float": pyarrow.array([1.5, None], pyarrow.float32()),
        "text": pyarrow.array(["ä", ""]),
        "bytes": pyarrow.array([b"\xff", b"\0"]),
        "word": pyarrow.array(["a", "b"]).dictionary_encode(),
    }
    write_table(folder / "a.parquet", **table)
    source = kdist.arriving_files(folder, "*.parquet", lambda columns: columns)
    data = training_data(source, batch_size=8)
    assert data.splits is not None
    data.splits.look()
    make = worker_dataset(data, num_workers=1, batch_size=8, num_seeds=0, seed=0)
    (batch, _) = next(iter(make_dataset(make, data, 0, 1, 0)))
    assert {name: values.dtype.name for name, values in batch.items()} == {
        "flag": "bool",
        "half": "float16",
        "small": "uint8",
        "float": "float32",
        "text": "string",
        "bytes": "string",
        "word": "string",
    }
    assert batch["text"].numpy().tolist() == ["ä".encode(), b""]
    assert batch["bytes"].numpy().tolist() == [b"\xff", b"\0"]
    assert batch["word"].numpy().tolist() == [b"a", b"b"]
    assert np.isnan(batch["float"].numpy()[1])


def test_a_null_where_no_number_stands_for_it_names_file_and_column(folder: Path, run_dir: Path) -> None:
    write_table(folder / "a.parquet", number=pyarrow.array([1, None]), label=np.ones(2, np.float32))
    with pytest.raises(TaskError, match="column number, of type int64, has 1 nulls") as raised:
        fit(arriving(folder), run_dir)
    assert "a.parquet, after 0 records" in str(raised.value)


def test_a_wrong_value_names_the_file_and_where_in_it(folder: Path, run_dir: Path) -> None:
    (folder / "a.csv").write_text("number,label\n" + "1,1.0\n" * 25 + "one,1.0\n")
    with pytest.raises(TaskError, match="a.csv, after 20 records:\nField 0 in record is not a valid int64: one"):
        fit(arriving(folder, "*.csv"), run_dir)


def test_another_header_names_the_file_and_the_column(folder: Path, run_dir: Path) -> None:
    (folder / "a.csv").write_text("number,price\n1,1.0\n")
    with pytest.raises(ConfigError, match="a.csv: column 2 is 'price', and columns says 'label'"):
        fit(arriving(folder, "*.csv"), run_dir)
    (folder / "a.csv").write_text("number\n1\n")
    with pytest.raises(ConfigError, match="a.csv: has 1 columns, and columns says 2"):
        fit(arriving(folder, "*.csv"), run_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": "nowhere"}, "there is no such folder"),
        ({"folder": "s3://bucket/folder"}, "is a URL"),
        ({"pattern": "*.json"}, "end in .tfrecord, .csv"),
        ({"pattern": "*.parquet.gz"}, "end in .tfrecord, .csv"),
        ({"pattern": "a/*.csv"}, "must be of names of files"),
        ({"pattern": "*.csv"}, "CSV files need columns"),
        ({"pattern": "*.tfrecord", "columns": {"a": "int64"}}, "TFRecord files have none"),
        ({"columns": {"a": "int46"}}, "columns: "),
        ({"columns": ["a"]}, "give the dtype of each column"),
        ({"idle_secs": float("inf")}, "idle_secs=inf: must be more than 0 and finite"),
        ({"poll_secs": 0}, "poll_secs=0: must be more than 0"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kdist.arriving_files(**{"folder": folder, "pattern": "*.parquet", "parse": counted.parse, **arguments})


def test_the_columns_of_a_first_file_have_to_be_there_and_readable(folder: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="there is no Parquet file yet to take the columns from; give columns"):
        fit(arriving(folder), run_dir)
    write_table(folder / "a.parquet", tags=[["x"]], number=[1])
    with pytest.raises(ConfigError, match=r"a.parquet: tags: list<.*> cannot be read; numbers, booleans and strings"):
        fit(arriving(folder), run_dir)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"strategy": "mirrored", "devices": 2}, {}, "strategy=mirrored: in every step every replica needs a batch"),
        ({"cluster": "2w"}, {}, "strategy=multi_worker_mirrored: in every step every replica needs a batch"),
        ({"steps_per_call": 4}, {}, "train.steps_per_call=4: .* a call is one step"),
        ({"cluster": "1ps1w", "local_steps": 2}, {}, "strategy.local_steps=2: .* a step is one batch"),
        ({}, {"class_weight": {0: 2.0}}, "parse returns labels and weights"),
        ({}, {"y": np.ones(3)}, "parse returns labels and weights"),
        ({}, {"validation_data": True}, "validation_data: data that keeps arriving is read once"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_starts(
    folder: Path, run_dir: Path, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    source = arriving(folder, "*.csv")
    options = {**options, "validation_data": source} if "validation_data" in options else options
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir, **arguments)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(source, verbose=0, **options)


def test_it_cannot_be_evaluated(folder: Path, run_dir: Path) -> None:
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir)
    for function in (trainer.evaluate, trainer.predict):
        with pytest.raises(ConfigError, match="is read once, by fit"):
            function(arriving(folder, "*.csv"))


def test_what_was_read_is_in_the_checkpoint_for_anyone_to_read(folder: Path, run_dir: Path) -> None:
    counted.write_file(folder / "0.csv", range(20))
    counted.write_file(folder / "1.csv", range(20, 40))
    fit(arriving(folder, "*.csv"), run_dir, steps=3)
    state = tf.train.load_checkpoint(str(run_dir / "checkpoints/ckpt-3")).get_tensor("data_state")
    assert state == b'{"found": ["0.csv", "1.csv"], "unread": [["1.csv", 10]]}'
