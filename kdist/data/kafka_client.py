"""Kafka by confluent-kafka (librdkafka): what is in a topic, asked by the chief, and messages, read by workers."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.data.splits import UnreadableSplit
from kdist.errors import ConfigError, DataSourceError

if TYPE_CHECKING:
    from confluent_kafka import Message

#: What workers read of each message, and the dtype.
FIELDS = {"value": "string", "key": "string", "timestamp": "int64", "partition": "int64", "offset": "int64"}

_ASK_SECS = 5.0
_READ_SECS = 60.0
_WAIT_SECS = 1.0
_MESSAGES_AT_ONCE = 1000
_NAME = re.compile(r"(?P<topic>.+)\[(?P<partition>\d+)\] (?P<begin>\d+)-(?P<end>\d+)")


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
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name}: is no run of messages")
        return cls(match["topic"], *(int(match[part]) for part in ("partition", "begin", "end")))


def require_confluent_kafka() -> None:
    """Imports confluent-kafka.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"Kafka needs confluent-kafka: pip install 'kdist[kafka]' ({error})") from error


class Client:
    """A consumer of no group: it is told what to read, and commits nothing. One thread at a time may use it.

    Args:
        config: of librdkafka; values that begin with `$` name environment variables.

    Raises:
        ConfigError: librdkafka refuses it, or a variable is not set.
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
                return {
                    partition: self._consumer.get_watermark_offsets(
                        TopicPartition(topic, partition), timeout=_ASK_SECS, cached=False
                    )
                    for partition in sorted(found.partitions)
                }
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
    """Reads a split in the process of a worker.

    Args:
        config: of the client, as JSON.
        name: of the split, see `Messages`.
        num_read: how many of its messages to leave out.

    Returns:
        An array of each of `FIELDS`.
    """
    found = client_of(config.decode()).read(Messages.named(name.decode()))[int(num_read) :]
    return [
        np.array([message.value() or b"" for message in found], object),
        np.array([_bytes(message.key()) for message in found], object),
        np.array([message.timestamp()[1] for message in found], np.int64),
        np.array([message.partition() for message in found], np.int64),
        np.array([message.offset() for message in found], np.int64),
    ]


def _bytes(key: bytes | str | None) -> bytes:
    return key.encode() if isinstance(key, str) else key or b""


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the values of the environment variables that it names."""
    resolved = dict(config)
    for key, value in config.items():
        if isinstance(value, str) and value.startswith("$"):
            if value[1:] not in os.environ:
                raise ConfigError(f"config: {key}={value}: this environment variable is not set")
            resolved[key] = os.environ[value[1:]]
    return resolved


def _text(error: Exception) -> str:
    """What an error of the client says, without its code."""
    first = error.args[0] if error.args else error
    return str(first.str() if hasattr(first, "str") else first)
