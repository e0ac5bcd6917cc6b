"""Numbered records, files of them, and a model that counts how often it was trained on each."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

NUM_RECORDS = 1000


@keras.saving.register_keras_serializable("tests")
class Sum(keras.losses.Loss):
    """Its gradient is -1 for each example, whatever the batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(reduction="sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -y_pred[:, 0]


def counting_model() -> keras.Model:
    """Each time that it is trained on record i, `kernel[i]` grows by 1."""
    model = keras.Sequential(
        [keras.layers.Input((NUM_RECORDS,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(1.0), loss=Sum())
    return model


def counts(model: keras.Model) -> np.ndarray:
    """The number of times that it was trained on each record."""
    kernel: np.ndarray = model.get_weights()[0][:, 0]
    return kernel


def parse(columns: Any) -> Any:
    return tf.one_hot(columns["number"], NUM_RECORDS), columns["label"]


def with_deadly(number: int) -> Any:
    """As `parse`; a batch with that record kills the process that reads it."""

    def parse_or_die(columns: Any) -> Any:
        def die() -> tf.Tensor:
            with tf.control_dependencies([tf.raw_ops.Abort(error_msg="deadly")]):
                return tf.constant(0.0)

        x, y = parse(columns)
        return x + tf.cond(tf.reduce_any(columns["number"] == number), die, lambda: tf.constant(0.0)), y

    return parse_or_die


def parse_record(serialized: Any) -> Any:
    features = {"number": tf.io.FixedLenFeature([], tf.int64), "label": tf.io.FixedLenFeature([], tf.float32)}
    return parse(tf.io.parse_example(serialized, features))


def parse_message(messages: Any) -> Any:
    numbers = tf.strings.to_number(messages["value"], tf.int64)
    return parse({"number": numbers, "label": tf.ones_like(numbers, tf.float32)})


class Broker:
    """librdkafka's mock cluster: it speaks Kafka's protocol at a port of this machine, and keeps messages in memory."""

    def __init__(self) -> None:
        import confluent_kafka

        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": "replaced", "test.mock.num.brokers": 1, "log_level": 1}
        )
        brokers = self._producer.list_topics(timeout=10).brokers.values()
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)

    def send(self, topic: str, numbers: Sequence[int], num_partitions: int = 2) -> None:
        """Sends each number as a message, to the partitions in turn."""
        for number in numbers:
            self._producer.produce(topic, value=str(number), key=b"k", partition=number % num_partitions)
        assert self._producer.flush(10) == 0


COLUMNS = {"number": "int64", "label": "float32"}


def write_file(path: Path, numbers: Sequence[int]) -> None:
    """Writes records in the format of the suffix, under a hidden name first, as a careful writer does."""
    unfinished = path.with_name(f".{path.name}")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        labels = np.ones(len(numbers), np.float32)
        table = pyarrow.table({"number": np.asarray(numbers, np.int64), "label": labels})
        pyarrow.parquet.write_table(table, unfinished, row_group_size=7)
    elif ".tfrecord" in path.name:
        options = "GZIP" if path.suffix == ".gz" else ""
        with tf.io.TFRecordWriter(str(unfinished), options) as records:
            for number in numbers:
                features = {
                    "number": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                    "label": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0])),
                }
                records.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    else:
        with gzip.open(unfinished, "wt") if path.suffix == ".gz" else unfinished.open("w") as file:
            csv.writer(file).writerows([["number", "label"], *([number, 1.0] for number in numbers)])
    unfinished.rename(path)


def write_files(folder: Path, suffix: str, sizes: Sequence[int]) -> int:
    """Writes files of so many records, numbered through all of them; returns how many these are."""
    first = 0
    for i, size in enumerate(sizes):
        write_file(folder / f"{i}{suffix}", range(first, first + size))
        first += size
    return first


def arriving_data(folder: str) -> dict[str, Any]:
    """Parquet files of the columns that `write_file` writes; for configs."""
    import kdist

    return {"x": kdist.arriving_files(folder, "*.parquet", parse, columns=COLUMNS, poll_secs=0.1)}
