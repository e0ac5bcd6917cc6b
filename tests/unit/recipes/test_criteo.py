"""The recipe `criteo`: where its rows come from, how files are read, and what the models are."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short
from kdist.recipes import criteo, criteo_files, criteo_truth
from kdist.recipes.criteo_files import Rows
from kdist.recipes.criteo_truth import Truth

from kdist.data.base import DataContext
from kdist.data.sources import training_data
from kdist.errors import ConfigError


def unchanged(rows: Rows) -> tuple[tf.Tensor, ...]:
    return rows.labels, rows.counts, rows.ids


def context(worker: int = 0, workers: int = 1, batch_size: int = 4, first_batch: int = 0) -> DataContext:
    return DataContext(tf.constant(worker, tf.int64), workers, batch_size, tf.constant(first_batch, tf.int64))


def batches(dataset: tf.data.Dataset, number: int) -> list[Any]:
    return list(dataset.take(number).as_numpy_iterator())


def are_equal(first: Any, second: Any) -> bool:
    pairs = zip(tf.nest.flatten(first), tf.nest.flatten(second))
    return all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f") for a, b in pairs)


def write_lines(path: Path, numbers: range) -> None:
    """Lines whose first count says which one it is."""
    path.write_text("".join(f"{number % 2}\t{number}" + "\t" * 12 + "\tab" * 26 + "\n" for number in numbers))


def numbers_read(files: list[str], worker: int, workers: int, number: int, **more: Any) -> list[int]:
    """The first counts of so many batches of four."""
    options = {"holds_out": False, "shuffle_rows": 8, "seed": 0, "transform": unchanged, **more}
    read = batches(criteo_files.reader(files, **options)(context(worker, workers)), number)
    return [int(count) for _, counts, _ in read for count in counts[:, 0]]


def test_a_batch_is_a_function_of_the_seed_and_its_number() -> None:
    def rows(seed: int, number: int) -> Any:
        return unchanged(Truth(0.001, seed).rows(tf.constant(number, tf.int64), 50)[0])

    assert are_equal(rows(3, 7), rows(3, 7))
    assert not are_equal(rows(3, 7), rows(3, 8))
    assert not are_equal(rows(3, 7), rows(4, 7))


def test_workers_generate_different_batches_and_a_resumed_run_continues() -> None:
    make = criteo.batches(0.001, 0, unchanged)
    first, second = (batches(make(context(worker, 2)), 3) for worker in (0, 1))
    assert not any(are_equal(one, other) for one in first for other in second)
    resumed = training_data(make).dataset(context(1, 2, first_batch=2))
    assert are_equal(batches(resumed, 1)[0], second[2])


def test_generated_rows_look_like_those_of_criteo() -> None:
    rows, probabilities = Truth(0.01, 0).rows(tf.constant(0, tf.int64), 50_000)
    labels, counts, ids = (column.numpy() for column in unchanged(rows))
    assert labels.mean() == pytest.approx(0.256, abs=0.02)
    assert criteo_truth.exact_auc(labels, probabilities.numpy()) == pytest.approx(0.80, abs=0.02)
    assert np.isnan(counts).mean() == pytest.approx(0.2, abs=0.01)
    assert np.nanmax(counts) > 500
    assert {len(name) for name in ids.ravel()} == {0, 8}
    _, occurrences = np.unique(ids[:, 2], return_counts=True)
    # Of a column of 101 312 ids.
    assert np.sort(occurrences)[::-1][:6890].sum() / len(ids) == pytest.approx(0.8, abs=0.1)
    assert len(np.unique(ids[:, 8])) == 3


def test_the_numbers_of_ids_are_scaled_but_those_of_small_columns() -> None:
    scaled = criteo_truth.scaled_cardinalities(0.001)
    assert scaled[:6] == [1000, 583, 10131, 2203, 305, 24]
    assert criteo_truth.scaled_cardinalities(1.0) == list(criteo_truth.CRITEO_CARDINALITIES)


def test_the_exact_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    labels, scores = np.array([0, 1, 0, 1, 0]), np.array([0.1, 0.9, 0.5, 0.4, 0.2])
    assert criteo_truth.exact_auc(labels, scores) == pytest.approx(5 / 6)
    assert np.isnan(criteo_truth.exact_auc(np.ones(5), scores))


def test_any_seed_of_32_bits_makes_a_truth() -> None:
    rows, _ = Truth(0.001, 2**32 - 1).rows(tf.constant(0, tf.int64), 4)
    assert rows.ids.shape == (4, 26)


@pytest.mark.parametrize("name", ["sample.tsv", "sample.tsv.gz"])
def test_a_sample_is_read_as_it_was_generated(name: str, tmp_path: Path) -> None:
    criteo.write_sample(tmp_path / name, 300, seed=5)
    files = criteo_files.find_files("data.path", str(tmp_path / name), 1)
    read = criteo_files.read_rows(files, is_held_out=False, num_rows=1000, transform=unchanged)
    assert are_equal(read, unchanged(Truth(0.001, 5).rows(tf.constant(-2, tf.int64), 300)[0]))


def test_files_are_those_of_a_file_a_folder_or_a_glob(tmp_path: Path) -> None:
    for name in ("b.tsv", "a.tsv", "c.tsv.gz", "_SUCCESS", ".hidden"):
        with gzip.open(tmp_path / name, "wb") if name.endswith(".gz") else (tmp_path / name).open("wb") as file:
            file.write(b"line\n")

    def names(path: str) -> list[str]:
        return [Path(file).name for file in criteo_files.find_files("data.path", str(tmp_path / path), 1)]

    assert names("") == ["a.tsv", "b.tsv", "c.tsv.gz"]
    assert names("*.tsv") == ["a.tsv", "b.tsv"]
    assert names("b.tsv") == ["b.tsv"]


def test_missing_short_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data.path=nowhere/\*.tsv: no such file; expected a file, a folder or a"):
        criteo.load_data("nowhere/*.tsv")
    (tmp_path / "short.tsv").write_text("1\n")
    with pytest.raises(ConfigError, match=r"short.tsv has 1 lines; expected at least 2$"):
        criteo.load_data(str(tmp_path))
    (tmp_path / "short.tsv").rename(tmp_path / "not.gz")
    with pytest.raises(ConfigError, match=r"not.gz cannot be read: Not a gzipped file"):
        criteo.load_data(str(tmp_path))


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        (0, "2", "label=2: must be 0 or 1"),
        (0, "", "label=: must be 0 or 1"),
        (3, "1.5", r"count=1\.5: must be a whole number"),
        (39, "ab\tcd", "41 columns: must be 40, tabs between"),
        (38, None, "39 columns: must be 40, tabs between"),
    ],
)
def test_a_wrong_line_is_named(column: int, value: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.tsv"
    criteo.write_sample(path, 50)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    lines[40][column : column + 1] = [] if value is None else [value]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=rf"^{path}, line 41: {what}$"):
        criteo.load_data(str(path))


def test_workers_read_different_files_if_there_are_enough(tmp_path: Path) -> None:
    for name, numbers in {"a": range(20), "b": range(20, 40), "c": range(40, 60)}.items():
        write_lines(tmp_path / name, numbers)
    files = criteo_files.find_files("data.path", str(tmp_path), 1)
    assert sorted(numbers_read(files, 0, 2, 10)) == [*range(20), *range(40, 60)]
    assert sorted(numbers_read(files, 1, 2, 5)) == list(range(20, 40))


def test_workers_read_different_lines_of_one_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "a", range(32))
    files = [str(tmp_path / "a")]
    first, second = (numbers_read(files, worker, 2, 4) for worker in (0, 1))
    assert sorted(first + second) == list(range(32))
    assert first != sorted(first)


def test_lines_for_validation_are_not_trained_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "a", range(60))
    files = [str(tmp_path / "a")]
    _, counts, _ = criteo_files.read_rows(files, is_held_out=True, num_rows=100, transform=unchanged)
    assert counts[:, 0].tolist() == [0, 20, 40]
    trained = numbers_read(files, 0, 1, 57, holds_out=True)
    assert set(trained) == set(range(60)) - {0, 20, 40}


def test_data_of_files_is_ready_for_the_model(tmp_path: Path) -> None:
    criteo.write_sample(tmp_path / "train.tsv", 100)
    criteo.write_sample(tmp_path / "validation.tsv", 30, seed=1)
    train, validation = str(tmp_path / "train.tsv"), str(tmp_path / "validation.tsv")
    data = criteo.load_data(train, validation, max_rows=100, num_validation=20)
    x, y = data["validation_data"]
    assert x["counts"].shape == (20, 13)
    assert x["ids"].dtype == np.int64
    assert (x["ids"] < criteo.table_lengths(100)).all()
    assert y.shape == (20, 1)
    ((inputs, labels),) = batches(data["x"](context()), 1)
    assert inputs["counts"].min() >= -1
    assert inputs["ids"].shape == (4, 26)
    assert labels.shape == (4, 1)


@pytest.mark.parametrize("interaction", in_short(criteo.INTERACTIONS, criteo.INTERACTIONS[:1]))
def test_models_give_probabilities_and_can_be_saved(interaction: str, tmp_path: Path) -> None:
    model = criteo.build_model(interaction, max_rows=50, dim=4)
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    assert [table.input_dim for table in tables] == criteo.table_lengths(50)
    x = {"counts": np.ones((3, 13), np.float32), "ids": np.arange(3 * 26).reshape(3, 26) % 50}
    clicks = model.predict(x, verbose=0)
    assert clicks.shape == (3, 1)
    assert ((clicks > 0) & (clicks < 1)).all()
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras").predict(x, verbose=0), clicks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interaction": "sum"}, "model.interaction=sum: choose one of dot, cross"),
        ({"ids": "raw"}, "model.ids=raw: choose one of hashed, dynamic"),
        ({"max_rows": 0}, "model.max_rows=0: must be a whole number, at least 1"),
        ({"dim": 1.5}, "model.dim=1.5: must be a whole number, at least 1"),
    ],
)
def test_wrong_arguments_of_the_model_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        criteo.build_model(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "data.scale=0: must be more than 0 and finite"),
        ({"num_validation": 0}, "data.num_validation=0: must be a whole number, at least 1"),
        ({"validation_path": "v.tsv"}, "data.validation_path=v.tsv: data.path is missing"),
    ],
)
def test_wrong_arguments_of_the_data_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        criteo.load_data(**arguments)
