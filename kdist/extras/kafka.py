"""`kafka_topic`: the messages of a Kafka topic, found by the chief and read by workers."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kdist.config.checks import check_more_than_zero, check_one_of, check_whole_number
from kdist.data.python_readers import offer_readers, read_by
from kdist.data.split_data import SplitSource
from kdist.data.splits import SplitEnumerator, UnreadableSplit
from kdist.errors import ConfigError, DataSourceError, install_command
from kdist.log import warn

if TYPE_CHECKING:
    from confluent_kafka import Message


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

    The chief cuts the new messages of each partition into splits, and a worker reads a split at once, into memory. Each
    checkpoint holds the offsets: a resumed run continues after the messages that its parameters were trained on.
    kdist neither joins a consumer group nor commits offsets to the broker. Training ends by `steps`, a signal, or when
    no message has arrived for `idle_secs`.

    Args:
        servers: addresses of brokers, as `host:9092,other:9092`; every worker connects to them.
        topic: the name of the topic. Partitions may be added while training runs.
        parse: makes `x`, `(x, y)` or `(x, y, sample_weight)` of the messages of a batch, in operations of TensorFlow.
            It gets a dict of tensors `[n]`: `value` and `key` (strings, empty if a message has none), `timestamp`
            (int64, milliseconds since 1970), `partition` and `offset` (int64).
        start: the start of a new run: `earliest`, with the oldest message, or `latest`, with the next.
        split_messages: messages of a split, at most.
        config: settings of librdkafka, as `security.protocol`. A value that begins with `$` is the name of an
            environment variable, which each client reads for itself; other values travel to the workers without
            encryption.
        idle_secs: seconds to wait for a message, if all others are read; also for brokers that cannot be reached.
        poll_secs: seconds between two requests for new messages.

    Raises:
        ConfigError: an argument is not allowed, or confluent-kafka is not installed.
    """
    check_one_of("start", start, ("earliest", "latest"))
    check_whole_number("split_messages", split_messages, required=True)
    check_more_than_zero("idle_secs", idle_secs)
    check_more_than_zero("poll_secs", poll_secs)
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"Kafka needs confluent-kafka: {install_command('kafka')} ({error})") from error
    for key, value in (config or {}).items():
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"config: {key} is a {type(value).__name__}; give a string or a number")
    everything = {"bootstrap.servers": servers, **(config or {})}
    return KafkaTopic(topic, parse, start, split_messages, everything, idle_secs, poll_secs)


@dataclass(frozen=True)
class KafkaTopic(SplitSource):
    """The source that `kafka_topic` returns; see there."""

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
        specs = {name: tf.TensorSpec([None], dtype) for name, dtype in FIELDS.items()}

        def messages(number: tf.Tensor) -> tf.data.Dataset:
            fields = read_by("kdist.kafka.messages", [config, split, number], list(specs.values()))
            return tf.data.Dataset.from_tensor_slices(dict(zip(specs, fields))).batch(batch_size)

        # In a separate dataset, so that it is read when the first batch is needed.
        return tf.data.Dataset.from_tensors(num_read).flat_map(messages).map(self.parse, tf.data.AUTOTUNE)


class TopicEnumerator(SplitEnumerator):
    """Finds messages; a split is a run of them in one partition.

    Raises:
        ConfigError: there is no such topic, or the client refuses its config.
        DataSourceError: no broker answers.
    """

    ended_by = None

    def __init__(self, source: KafkaTopic) -> None:
        self.place = f"topic {source.topic} at {source.config['bootstrap.servers']}"
        self.poll_secs = source.poll_secs
        self.idle_secs = source.idle_secs
        self._source = source
        self._client = client_of(json.dumps(dict(source.config)))
        #: The next offset to find, by partition.
        self._found: dict[int, int] = {}
        try:
            present = self._client.ranges(source.topic)
        except OSError as error:
            raise DataSourceError(f"{self.place} cannot be reached: {error}") from error
        if source.start == "latest":
            self._found = {partition: end for partition, (_, end) in present.items()}

    def discover(self) -> list[str]:
        new: list[str] = []
        topic, size = self._source.topic, self._source.split_messages
        for partition, (first, end) in self._client.ranges(topic).items():
            begin = self._found.get(partition, first)
            if begin < first:
                warn(f"{Messages(topic, partition, begin, first)} were deleted before they were read")
                begin = first
            new += [str(Messages(topic, partition, at, min(at + size, end))) for at in range(begin, end, size)]
            self._found[partition] = max(begin, end)
        return new

    def state(self) -> dict[str, int]:
        return {str(partition): offset for partition, offset in sorted(self._found.items())}

    def restore(self, state: dict[str, int]) -> None:
        self._found = {int(partition): offset for partition, offset in state.items()}


#: The fields of a message that workers read, and their dtypes.
FIELDS = {"value": "string", "key": "string", "timestamp": "int64", "partition": "int64", "offset": "int64"}

_ASK_SECS = 5.0
_READ_SECS = 60.0
_WAIT_SECS = 1.0
_MESSAGES_AT_ONCE = 1000


@dataclass(frozen=True)
class Messages:
    """The messages of a partition from offset `begin` until before `end`, which need not all exist."""

    topic: str
    partition: int
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.begin}-{self.end}"

    @classmethod
    def named(cls, name: str) -> Messages:
        """Undoes `str`."""
        topic, _, numbers = name.rpartition("[")
        partition, begin, end = map(int, re.findall(r"\d+", numbers))
        return cls(topic, partition, begin, end)


class Client:
    """A consumer of no group: it reads given offsets, and commits nothing. One thread at a time may use it.

    Raises:
        ConfigError: librdkafka refuses the config, or a variable that it names is not set.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        import confluent_kafka

        own = {
            # Without a group the client cannot be made; nothing ever joins it.
            "group.id": "kdist",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            # Messages that are gone are an error, and not a reason to read others.
            "auto.offset.reset": "error",
            # Its own lines about brokers that cannot be reached: kdist says so itself.
            "log_level": 1,
        }
        try:
            self._consumer = confluent_kafka.Consumer({**own, **_resolved(config)})
        except (confluent_kafka.KafkaException, TypeError, ValueError) as error:
            raise ConfigError(f"config: the Kafka client refuses it: {_text(error)}") from error
        self._lock = threading.Lock()

    def ranges(self, topic: str) -> dict[int, tuple[int, int]]:
        """The offsets of the first message of each partition, and of the next one to come.

        Raises:
            ConfigError: there is no such topic.
            OSError: no broker answers.
        """
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        with self._lock:
            try:
                found = self._consumer.list_topics(topic, timeout=_ASK_SECS).topics[topic]
                if found.error is not None:
                    if found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                        raise ConfigError(f"topic={topic}: there is no such topic")
                    raise OSError(found.error.str())
                ends_of = partial(self._consumer.get_watermark_offsets, timeout=_ASK_SECS, cached=False)
                return {number: ends_of(TopicPartition(topic, number)) for number in sorted(found.partitions)}
            except KafkaException as error:
                raise OSError(_text(error)) from error

    def read(self, wanted: Messages) -> list[Message]:
        """The messages, in their order.

        Raises:
            UnreadableSplit: they were deleted.
            DataSourceError: no broker answers.
        """
        from confluent_kafka import TopicPartition

        found: list[Message] = []
        position, deadline = wanted.begin, time.monotonic() + _READ_SECS
        with self._lock:
            self._consumer.assign([TopicPartition(wanted.topic, wanted.partition, wanted.begin)])
            try:
                while position < wanted.end:
                    if time.monotonic() > deadline:
                        raise DataSourceError(f"{wanted}: no broker has sent them within {_READ_SECS:g} s")
                    at_once = min(wanted.end - position, _MESSAGES_AT_ONCE)
                    for event in self._consumer.consume(at_once, timeout=_WAIT_SECS):
                        position = _position_after(event, position)
                        if event.error() is None and event.offset() < wanted.end:
                            found.append(event)
                            deadline = time.monotonic() + _READ_SECS
            finally:
                self._consumer.unassign()
        return found


def _position_after(event: Message, position: int) -> int:
    """The offset up to which all is read. Not every offset has a message."""
    error = event.error()
    if error is None:
        return int(event.offset()) + 1
    if error.name() == "_AUTO_OFFSET_RESET":
        raise UnreadableSplit(f"they were deleted ({error.str()})")
    # After other errors the client tries again by itself.
    return int(event.offset()) if error.name() == "_PARTITION_EOF" else position


@lru_cache(maxsize=8)
def client_of(config: str) -> Client:
    """The client of this process for a config, as JSON."""
    return Client(json.loads(config))


def messages(config: bytes, name: bytes, num_read: np.ndarray) -> list[np.ndarray]:
    """Reads a split in the process of a worker, but its first `num_read` messages; returns arrays of `FIELDS`."""
    found = client_of(config.decode()).read(Messages.named(name.decode()))[int(num_read) :]
    keys = [message.key() or b"" for message in found]
    return [
        np.array([message.value() or b"" for message in found], object),
        np.array([key.encode() if isinstance(key, str) else key for key in keys], object),
        np.array([message.timestamp()[1] for message in found], np.int64),
        np.array([message.partition() for message in found], np.int64),
        np.array([message.offset() for message in found], np.int64),
    ]


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the values of the environment variables that it names."""
    named = {key: value[1:] for key, value in config.items() if isinstance(value, str) and value.startswith("$")}
    for key, name in named.items():
        if name not in os.environ:
            raise ConfigError(f"config: {key}=${name}: this environment variable is not set")
    return {**config, **{key: os.environ[name] for key, name in named.items()}}


def _text(error: Exception) -> str:
    """The message of an error of the client, without its code."""
    first = error.args[0] if error.args else error
    return str(first.str() if hasattr(first, "str") else first)
