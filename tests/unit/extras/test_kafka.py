"""The messages of a Kafka topic, against librdkafka's mock cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import counted
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist._compat.tensorflow import offer_python_function
from kdist.data.split_data import why_unreadable
from kdist.data.splits import Split, UnreadableSplit
from kdist.errors import ConfigError, DataSourceError
from kdist.extras import kafka as kafka_client
from kdist.extras.kafka import Client, KafkaTopic, Messages


@pytest.fixture
def broker() -> Iterator[counted.Broker]:
    yield counted.Broker()
    kafka_client.client_of.cache_clear()


def topic(broker: counted.Broker, **arguments: Any) -> KafkaTopic:
    given = {"idle_secs": 0.2, "poll_secs": 0.05, **arguments}
    return kdist.kafka_topic(broker.servers, "clicks", counted.parse_message, **given)


def trained_on(trainer: kdist.Trainer) -> set[int]:
    counts = counted.counts(trainer.model)
    assert set(counts) <= {0, 1}
    return set(np.flatnonzero(counts))


def test_messages_are_cut_into_splits_as_they_arrive(broker: counted.Broker) -> None:
    broker.send("clicks", range(25))
    found = topic(broker, split_messages=10).enumerator()
    assert found.discover() == ["clicks[0] 0-10", "clicks[0] 10-13", "clicks[1] 0-10", "clicks[1] 10-12"]
    assert found.discover() == []
    broker.send("clicks", [25, 27])
    assert found.discover() == ["clicks[1] 12-14"]
    assert found.ended_by is None
    again = topic(broker).enumerator()
    again.restore(json.loads(json.dumps(found.state())))
    broker.send("clicks", [2])
    assert again.discover() == ["clicks[0] 13-14"]


def test_a_run_may_start_with_the_next_message(broker: counted.Broker) -> None:
    broker.send("clicks", range(4))
    found = topic(broker, start="latest").enumerator()
    assert found.discover() == []
    broker.send("clicks", [4])
    assert found.discover() == ["clicks[0] 2-3"]


def test_every_message_is_trained_on_once_also_after_a_resume(broker: counted.Broker, run_dir: Path) -> None:
    broker.send("clicks", range(50))
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir)
    trainer.fit(topic(broker), batch_size=10, steps=4, verbose=0)
    assert len(trained_on(trainer)) == 35
    state = tf.train.load_checkpoint(str(run_dir / "checkpoints/ckpt-4")).get_tensor("data_state")
    # The mock cluster has made four partitions.
    assert json.loads(state) == {"found": {"0": 25, "1": 25, "2": 0, "3": 0}, "unread": [["clicks[1] 0-25", 10]]}
    broker.send("clicks", range(50, 60))
    trainer = kdist.Trainer(counted.counting_model, run_dir=run_dir)
    trainer.fit(topic(broker), batch_size=7, verbose=0)
    assert trained_on(trainer) == set(range(60))
    assert trainer.result.stopped_by == f"topic clicks at {broker.servers}, where nothing arrived for 0.2 s"


def test_all_fields_of_a_message_are_there(broker: counted.Broker) -> None:
    broker.send("clicks", [1, 3, 5])
    config = json.dumps({"bootstrap.servers": broker.servers}).encode()
    fields = dict(zip(kafka_client.FIELDS, kafka_client.messages(config, b"clicks[1] 0-3", np.int64(1))))
    assert [fields[name].tolist() for name in ("value", "key", "partition", "offset")] == [
        [b"3", b"5"],
        [b"k", b"k"],
        [1, 1],
        [1, 2],
    ]
    assert (fields["timestamp"] > 1_700_000_000_000).all()


def test_a_broker_that_cannot_be_reached_is_one_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "_ASK_SECS", 0.2)
    source = kdist.kafka_topic("127.0.0.1:1", "clicks", counted.parse_message)
    with pytest.raises(DataSourceError, match="^topic clicks at 127.0.0.1:1 cannot be reached: ") as raised:
        kdist.Trainer(counted.counting_model, run_dir=run_dir).fit(source, verbose=0)
    assert raised.value.exit_code == 75


def test_a_topic_that_is_not_there_is_refused(broker: counted.Broker) -> None:
    with pytest.raises(ConfigError, match="topic=clicks: there is no such topic"):
        topic(broker).enumerator()


def test_messages_that_do_not_come_are_an_error(broker: counted.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "_READ_SECS", 0.2)
    monkeypatch.setattr(kafka_client, "_WAIT_SECS", 0.05)
    broker.send("clicks", range(4))
    client = Client({"bootstrap.servers": broker.servers})
    with pytest.raises(DataSourceError, match=r"^clicks\[0\] 0-5: no broker has sent them within 0.2 s$"):
        client.read(Messages("clicks", 0, 0, 5))


class Event:
    """A message, or an event in its place."""

    def __init__(self, offset: int, error: str | None = None) -> None:
        self._offset, self._error = offset, error

    def offset(self) -> int:
        return self._offset

    def error(self) -> Any:
        return (
            None
            if self._error is None
            else confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, self._error))
        )


class Events:
    """Stands for a consumer of a partition in which not every offset has a message."""

    def __init__(self, *events: Event) -> None:
        self._events = list(events)

    def assign(self, partitions: Any) -> None:
        pass

    def unassign(self) -> None:
        pass

    def consume(self, num_messages: int, timeout: float) -> list[Event]:
        taken, self._events = self._events[:num_messages], self._events[num_messages:]
        return taken


@pytest.mark.parametrize(
    ("events", "offsets"),
    [
        ([Event(0), Event(3), Event(7)], [0, 3]),
        ([Event(0), Event(3), Event(6, "_PARTITION_EOF")], [0, 3]),
        # The end of what is there now is not the end of what is wanted; and the client goes on after other errors.
        ([Event(0), Event(1, "_PARTITION_EOF"), Event(-1, "_TRANSPORT"), Event(4), Event(5)], [0, 4, 5]),
        ([Event(6)], []),
    ],
)
def test_offsets_without_a_message_are_left_out(
    monkeypatch: pytest.MonkeyPatch, events: list[Event], offsets: list[int]
) -> None:
    client = Client({"bootstrap.servers": "127.0.0.1:1"})
    monkeypatch.setattr(client, "_consumer", Events(*events))
    assert [message.offset() for message in client.read(Messages("clicks", 0, 0, 6))] == offsets


def test_messages_that_were_deleted_are_skipped_with_a_warning(
    broker: counted.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client({"bootstrap.servers": "127.0.0.1:1"})
    monkeypatch.setattr(client, "_consumer", Events(Event(-1, "_AUTO_OFFSET_RESET")))
    with pytest.raises(UnreadableSplit, match="they were deleted"):
        client.read(Messages("clicks", 0, 0, 6))
    broker.send("clicks", range(8))
    found = topic(broker).enumerator()
    monkeypatch.setattr(found._client, "ranges", lambda topic: {0: (3, 5)})
    found.restore({"0": 1})
    with pytest.warns(UserWarning, match=r"clicks\[0\] 1-3 were deleted before they were read"):
        assert found.discover() == ["clicks[0] 3-5"]


def test_what_a_reader_raises_keeps_its_meaning() -> None:
    raised: list[Exception] = [UnreadableSplit("torn"), DataSourceError("gone"), ValueError("a null")]

    def read() -> np.ndarray:
        raise raised[0]

    offer_python_function("tests.read", read)
    found = []
    for _ in range(3):
        dataset = tf.data.Dataset.range(1).map(
            lambda number: tf.raw_ops.PyFunc(input=[], token="tests.read", Tout=[tf.int64])
        )
        with pytest.raises(tf.errors.OpError) as error:
            next(iter(dataset))
        try:
            found.append(why_unreadable(error.value, Split("a")))
        except DataSourceError as unreachable:
            found.append(str(unreachable))
        raised.pop(0)
    assert found == ["torn", "gone", None]


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, broker: counted.Broker) -> None:
    monkeypatch.setenv("SECRET", "password")
    source = topic(broker, config={"sasl.password": "$SECRET", "security.protocol": "sasl_plaintext"})
    assert "SECRET" not in repr(source)
    assert "password" not in json.dumps(dict(source.config).get("sasl.password"))
    monkeypatch.delenv("SECRET")
    with pytest.raises(ConfigError, match=r"config: sasl.password=\$SECRET: this environment variable is not set"):
        source.enumerator()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "yesterday"}, "start=yesterday: choose one of earliest, latest"),
        ({"split_messages": 0}, "split_messages=0: must be a whole number"),
        ({"idle_secs": float("inf")}, "idle_secs=inf: must be more than 0 and finite"),
        ({"config": {"error_cb": print}}, "config: error_cb is a builtin_function_or_method"),
    ],
)
def test_wrong_arguments_are_refused(broker: counted.Broker, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topic(broker, **arguments)


def test_a_config_that_the_client_refuses_is_refused(broker: counted.Broker) -> None:
    broker.send("clicks", [1])
    with pytest.raises(ConfigError, match='config: the Kafka client refuses it: No such configuration property: "no"'):
        topic(broker, config={"no": 1}).enumerator()
