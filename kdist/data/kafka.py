"""`kafka_topic`: the messages of a Kafka topic, as training data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from kdist.config.checks import check_more_than_zero, check_one_of, check_whole_number
from kdist.data import kafka_client
from kdist.data.kafka_client import Messages
from kdist.data.python_readers import offer_readers, read_by
from kdist.data.split_data import SplitSource
from kdist.data.splits import SplitEnumerator
from kdist.errors import ConfigError, DataSourceError
from kdist.log import warn


def kafka_topic(
    servers: str,
    topic: str,
    parse: Callable[[Any], Any],
    *,
    start: str = "earliest",
    split_messages: int = 10_000,
    config: Mapping[str, Any] | None = None,
    idle_secs: float = 3600.0,
    poll_secs: float = 1.0,
) -> KafkaTopic:
    """The messages of a Kafka topic, as data for `Trainer.fit`: every message is read once, by one worker.

    The chief cuts what has arrived in each partition into splits, and a worker reads a split at once, into memory. What
    was read is part of each checkpoint: a resumed run reads what the checkpoint's parameters were not trained on.
    kdist neither joins a consumer group nor commits offsets to the broker. Training ends by `steps`, a signal, or when
    no message has arrived for `idle_secs`.

    Args:
        servers: addresses of brokers, as `host:9092,other:9092`; every worker connects to them.
        topic: its name. Partitions may be added while training runs.
        parse: makes `x`, `(x, y)` or `(x, y, sample_weight)` of the messages of a batch, in operations of TensorFlow.
            It gets a dict of tensors `[n]`: `value` and `key` (strings, empty if a message has none), `timestamp`
            (int64, milliseconds since 1970), `partition` and `offset` (int64).
        start: where a new run begins: `earliest`, with the oldest message that is there, or `latest`, with the next.
        split_messages: messages of a split, at most.
        config: for the client, librdkafka, as `security.protocol`. A value that begins with `$` is the name of an
            environment variable, which is read where the client runs: what is written here travels to the workers
            without encryption.
        idle_secs: seconds to wait for a message, if all others are read; also for brokers that cannot be reached.
        poll_secs: seconds between two questions whether there are new ones.

    Raises:
        ConfigError: an argument is not allowed, or confluent-kafka is not installed.
    """
    check_one_of("start", start, ("earliest", "latest"))
    check_whole_number("split_messages", split_messages, required=True)
    check_more_than_zero("idle_secs", idle_secs)
    check_more_than_zero("poll_secs", poll_secs)
    kafka_client.require_confluent_kafka()
    for key, value in (config or {}).items():
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"config: {key} is a {type(value).__name__}; give a string or a number")
    everything = {"bootstrap.servers": servers, **(config or {})}
    return KafkaTopic(topic, parse, start, split_messages, everything, idle_secs, poll_secs)


@dataclass(frozen=True)
class KafkaTopic(SplitSource):
    """What `kafka_topic` returns; see there."""

    topic: str
    parse: Callable[[Any], Any]
    start: str
    split_messages: int
    config: Mapping[str, Any] = field(repr=False)
    idle_secs: float
    poll_secs: float

    def enumerator(self) -> TopicEnumerator:
        # A worker in this process reads, too.
        offer_readers()
        return TopicEnumerator(self)

    def batches(self, split: tf.Tensor, num_read: tf.Tensor, batch_size: int) -> tf.data.Dataset:
        config = json.dumps(dict(self.config))
        specs = {name: tf.TensorSpec([None], dtype) for name, dtype in kafka_client.FIELDS.items()}

        def messages(number: tf.Tensor) -> tf.data.Dataset:
            fields = read_by("kdist.kafka.messages", [config, split, number], list(specs.values()))
            return tf.data.Dataset.from_tensor_slices(dict(zip(specs, fields))).batch(batch_size)

        # In a dataset of its own, so that it is read when the first batch is needed.
        return tf.data.Dataset.from_tensors(num_read).flat_map(messages).map(self.parse, tf.data.AUTOTUNE)


class TopicEnumerator(SplitEnumerator):
    """Finds messages; a split is a run of them in one partition.

    Args:
        source: the topic.

    Raises:
        ConfigError: there is no such topic, or the client refuses its config.
        DataSourceError: no broker answers.
    """

    def __init__(self, source: KafkaTopic) -> None:
        self.place = f"topic {source.topic} at {source.config['bootstrap.servers']}"
        self.poll_secs = source.poll_secs
        self.idle_secs = source.idle_secs
        self._source = source
        self._client = kafka_client.client_of(json.dumps(dict(source.config)))
        #: The offset that follows what was found, by partition.
        self._found: dict[int, int] = {}
        try:
            present = self._client.ranges(source.topic)
        except OSError as error:
            raise DataSourceError(f"{self.place} cannot be reached: {error}") from error
        if source.start == "latest":
            self._found = {partition: end for partition, (_, end) in present.items()}

    def discover(self) -> list[str]:
        return [str(messages) for messages in self._new_messages()]

    def _new_messages(self) -> Iterator[Messages]:
        for partition, (first, end) in self._client.ranges(self._source.topic).items():
            begin = self._found.get(partition, first)
            if begin < first:
                warn(f"{Messages(self._source.topic, partition, begin, first)} were deleted before they were read")
                begin = first
            size = self._source.split_messages
            yield from (
                Messages(self._source.topic, partition, at, min(at + size, end)) for at in range(begin, end, size)
            )
            self._found[partition] = max(begin, end)

    @property
    def ended_by(self) -> str | None:
        return None

    def state(self) -> dict[str, int]:
        return {str(partition): offset for partition, offset in sorted(self._found.items())}

    def restore(self, state: dict[str, int]) -> None:
        self._found = {int(partition): offset for partition, offset in state.items()}
