"""Files of records for many epochs: each record once an epoch, in blocks, ranges and shares, and what is refused."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import counted
import numpy as np
import pytest
import tensorflow as tf
from helpers import in_short

import kdist
from kdist.data import file_blocks
from kdist.data.base import DataContext, Readers
from kdist.data.files import FileData, Files, RangeQueue
from kdist.data.splits import NothingToRead

SUFFIXES = in_short([".parquet", ".csv", ".csv.gz", ".tfrecord", ".tfrecord.gz"], {".parquet", ".csv", ".tfrecord.gz"})
#: Not of one size; one has nothing.
SIZES = [130, 0, 7, 63, 300]
TOTAL = sum(SIZES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(folder: Path, suffix: str) -> None:
    counted.write_files(folder, suffix, SIZES)
    (folder / f"_ignored{suffix}").touch()


def source(folder: Path, suffix: str, **arguments: Any) -> Files:
    if "tfrecord" in suffix:
        arguments["features"] = {"number": "int64", "label": "float32"}
    return kdist.files(folder, label="label", **arguments)


def numbers_of(dataset: tf.data.Dataset) -> list[np.ndarray]:
    return [x["number"].numpy() for x, _ in dataset]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_blocks, "_BLOCK_BYTES", 256)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_records_are_read_in_order_in_full_batches(folder: Path, suffix: str) -> None:
    write(folder, suffix)
    data = source(folder, suffix)
    assert data.num_records == TOTAL
    batches = numbers_of(data.dataset(64))
    assert [len(batch) for batch in batches] == [64] * (TOTAL // 64) + [TOTAL % 64]
    np.testing.assert_array_equal(np.concatenate(batches), np.arange(TOTAL))
    assert int(data.dataset(64).cardinality()) == len(batches)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".tfrecord"])
def test_files_are_read_in_several_blocks(folder: Path, suffix: str) -> None:
    write(folder, suffix)
    blocks = source(folder, suffix).blocks
    assert [sum(block.num_records for block in of_file) for of_file in blocks] == SIZES
    assert len(blocks[-1]) > 2


@pytest.mark.parametrize("suffix", in_short([".parquet", ".csv", ".csv.gz", ".tfrecord"], {".csv", ".csv.gz"}))
def test_a_range_is_shuffled_by_epoch_and_continues_anywhere(folder: Path, suffix: str) -> None:
    write(folder, suffix)
    data = source(folder, suffix, shuffle_records=50)

    def records(epoch: int, num_read: int = 0, batch_size: int = 32) -> np.ndarray:
        seed = 7, tf.constant(epoch, tf.int64)
        begin, end = (tf.constant(n, tf.int64) for n in (20, TOTAL - 30))
        read = data.read(begin, end, batch_size, num_read=tf.constant(num_read, tf.int64), seed=seed)
        return np.concatenate(numbers_of(read))

    first = records(0)
    assert len(set(first)) == len(first) == TOTAL - 50
    np.testing.assert_array_equal(first, records(0))
    assert list(first) != list(records(1))
    assert list(first[:50]) != sorted(first[:50])
    # Also with other batches.
    for num_read in (32, 64, 96, TOTAL - 51):
        np.testing.assert_array_equal(records(0, num_read, 27), first[num_read:])


@pytest.mark.parametrize("num_workers", in_short([1, 2, 3], {1, 3}))
@pytest.mark.parametrize("batch_size", in_short([40, 83], {83}))
def test_the_shares_of_an_epoch_are_all_records(folder: Path, num_workers: int, batch_size: int) -> None:
    write(folder, ".csv")
    data = FileData(source(folder, ".csv"), batch_size, shuffle=True, seed=3, readers=Readers(num_workers))
    assert data.splits is None
    num_batches = data.batches_per_pass(num_workers) // num_workers
    seen: Counter[int] = Counter()
    for worker in range(num_workers):
        for first in (0, num_batches + 1):
            place = tf.constant(first, tf.int64)
            context = DataContext(tf.constant(worker, tf.int64), num_workers, batch_size, place)
            batches = numbers_of(data.dataset(context).take(2 * num_batches - first))
            if not first:
                whole = batches
        seen.update(np.concatenate(whole).tolist())
        # A resumed run finds its place in the second epoch.
        np.testing.assert_array_equal(np.concatenate(batches), np.concatenate(whole[num_batches + 1 :]))
    assert set(seen) == set(range(TOTAL))
    # Two epochs; a worker whose share has a batch less takes one record again.
    assert seen.total() <= 2 * (TOTAL + num_workers - 1)


def test_ranges_are_an_epoch_and_the_next_one_begins_when_it_was_read() -> None:
    queue = RangeQueue(1000, num_workers=2, batch_size=10)
    read, lengths = [], []
    while queue.look():
        split = queue.assign(0)
        epoch, begin, end = queue.range_of(split)
        if epoch:
            break
        read.extend(range(begin, end))
        lengths.append(end - begin)
        assert queue.batches_left(0) == len(range(begin, end, 10))
        queue.advance(0, queue.batches_left(0))
    assert read == list(range(1000))
    assert lengths == sorted(lengths, reverse=True)
    assert all(length % 10 == 0 for length in lengths)


def test_no_range_of_the_next_epoch_is_handed_out_while_one_is_read() -> None:
    queue = RangeQueue(320, num_workers=2, batch_size=10)
    queue.look()
    queue.assign(0)
    queue.assign(1)
    queue.advance(0, queue.batches_left(0))
    assert not queue.look()
    with pytest.raises(NothingToRead):
        queue.assign(0)
    state = queue.state()
    queue.advance(1)
    later = RangeQueue(320, num_workers=5, batch_size=7)
    later.restore(state)
    assert later.look()
    assert later.assign(4).num_read == 0
    queue.finish(1)
    assert queue.look()
    assert queue.assign(0).name.startswith("epoch 1")


def test_fit_evaluate_and_predict_of_one_process(folder: Path, run_dir: Path) -> None:
    write(folder, ".csv")
    data = source(folder, ".csv").map(lambda x, y: (tf.one_hot(x["number"], counted.NUM_RECORDS), y))
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir)
    history = trainer.fit(data, batch_size=64, epochs=3, validation_data=data, verbose=0)
    assert len(history.epoch) == 3
    np.testing.assert_array_equal(counted.counts(trainer.model)[:TOTAL], 3)
    assert trainer.evaluate(data, batch_size=64, verbose=0) == pytest.approx(history.history["val_loss"][-1])
    assert trainer.predict(data, batch_size=64, verbose=0).shape == (TOTAL, 1)


def test_columns_and_their_dtypes_are_found_in_csv_files(folder: Path) -> None:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "price", "name", "year"], [1, 2.5, 'a "quoted", one', 1999], [2, "", "b", 2001], [3, 4, "c", ""]]
        )
    x, y = next(iter(kdist.files(folder / "*.csv", label="id", columns=["id", "price", "name"]).dataset(8)))
    np.testing.assert_array_equal(y, [1, 2, 3])
    np.testing.assert_array_equal(x["price"], np.array([2.5, np.nan, 4], np.float32))
    assert list(x["name"].numpy()) == [b'a "quoted", one', b"b", b"c"]
    records = next(iter(kdist.files(folder / "a.csv", columns={"year": "float64"}).dataset(8)))
    assert set(records) == {"year"}
    assert records["year"].dtype == tf.float64


def test_lines_that_end_within_quotes_are_read(folder: Path) -> None:
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "y"], ["one\ntwo", 1], ["three", 2], ["\n", 3]])
    (x, y), *others = kdist.files(folder, label="y").dataset(8)
    assert (list(x["text"].numpy()), list(y.numpy()), others) == ([b"one\ntwo", b"three", b"\n"], [1, 2, 3], [])


def test_features_of_examples_are_decoded(folder: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as file:
        for image in images:
            feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()]))
            tags = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(image[0, 0])]))
            example = tf.train.Example(features=tf.train.Features(feature={"image": feature, "tags": tags}))
            file.write(example.SerializeToString())
    features = {"image": ["uint8", [3, 4]], "tags": tf.io.RaggedFeature(tf.int64)}
    records = next(iter(kdist.files(folder, features=features).dataset(2)))
    np.testing.assert_array_equal(records["image"], images)
    assert records["tags"].to_list() == [[0], [12]]


class Lines(kdist.FileFormat):
    """A format of one's own: a record is a line."""

    suffixes = (".txt",)

    def count(self, file: Any) -> int:
        return len(file.readlines())

    def batches(self, path: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        return tf.data.TextLineDataset(path).skip(num_read).batch(batch_size)


def test_a_format_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    (folder / "other.csv").touch()
    batches = list(kdist.files(folder, file_format=Lines()).dataset(3).as_numpy_iterator())
    assert [list(batch) for batch in batches] == [[b"a1", b"a2", b"b1"], [b"b2"]]
    # By an entry point of a package.
    monkeypatch.setattr("kdist.data.file_formats.entry_points", lambda group: [Point()] if group else [])
    assert kdist.files(folder / "*.txt").num_records == 4


class Point:
    name = "txt"

    def load(self) -> type:
        return Lines


def test_files_at_a_url(folder: Path) -> None:
    for suffix in (".parquet", ".csv", ".tfrecord"):
        counted.write_file(folder / f"a{suffix}", range(100))
        data = (
            source(folder, suffix, path=f"file://{folder}/*{suffix}")
            if False
            else kdist.files(
                f"file://{folder}/*{suffix}",
                features={"number": "int64", "label": "float32"} if suffix == ".tfrecord" else None,
                label="label",
            )
        )
        np.testing.assert_array_equal(np.concatenate(numbers_of(data.dataset(32))), np.arange(100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": "lable"}, "label=lable: .*a.csv has number, label; did you mean label?"),
        ({"columns": ["numbr"]}, "columns: .*a.csv has number, label, no numbr; did you mean number?"),
        ({"columns": "number"}, "columns='number': give the names"),
        ({"columns": {"number": "int63"}}, "number: 'int63' is no dtype"),
        ({"features": {"number": "int64"}}, "features: are of TFRecord files"),
        ({"sample_weight": "label"}, "sample_weight=label: needs label as well"),
        ({"shuffle_records": 0}, "shuffle_records=0"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, arguments: dict[str, Any], message: str) -> None:
    counted.write_file(folder / "a.csv", range(3))
    with pytest.raises(kdist.ConfigError, match=message):
        kdist.files(folder, **arguments)


def test_wrong_files_are_refused(folder: Path) -> None:
    with pytest.raises(kdist.ConfigError, match="has no files"):
        kdist.files(folder)
    with pytest.raises(kdist.ConfigError, match=r"nothing.*: there is no such file"):
        kdist.files(folder / "nothing*.csv")
    (folder / "a.xyz").touch()
    with pytest.raises(kdist.ConfigError, match=r"has files that end in .xyz; give files of one format: .csv"):
        kdist.files(folder)
    (folder / "a.xyz").unlink()
    counted.write_file(folder / "a.csv", range(3))
    (folder / "b.csv").write_text("number,price\n1,2\n")
    with pytest.raises(kdist.ConfigError, match=r"b.csv: column 2 is 'price', and columns says 'label'"):
        kdist.Trainer(counted.counting_model).fit(kdist.files(folder, label="label"))
    (folder / "a.tfrecord").write_bytes(b"x" * 20)
    with pytest.raises(kdist.ConfigError, match=r"a.tfrecord: cannot be read: its last record is not complete"):
        kdist.files(folder / "*.tfrecord").num_records  # noqa: B018
    (folder / "a.parquet").write_bytes(b"x" * 20)
    with pytest.raises(kdist.ConfigError, match=r"a.parquet: cannot be read"):
        kdist.files(folder / "*.parquet")


def test_labels_cannot_be_given_beside(folder: Path) -> None:
    counted.write_file(folder / "a.csv", range(3))
    with pytest.raises((kdist.ConfigError, ValueError), match="y and sample_weight are part of its elements"):
        kdist.Trainer(counted.counting_model).fit(kdist.files(folder, label="label"), np.zeros(3))
