"""Blocks: runs of whole records in a file, or an object at a URL, each of which a process can read by itself."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, NamedTuple

import numpy as np

from kdist.data.splits import UnreadableSplit
from kdist.errors import ConfigError

GZIP = ".gz"
_BLOCK_BYTES = 1 << 20
#: The length of a TFRecord and its checksum, before the record, and that of the record, behind it.
_HEADER, _FOOTER = 12, 4


class Block(NamedTuple):
    """The number of its records, and its place in the file: two numbers whose meaning the format knows."""

    num_records: int
    begin: int
    end: int


def is_url(place: str) -> bool:
    """True if a place is a URL, which fsspec opens; otherwise it is a path."""
    return "://" in place


@contextmanager
def opened(place: str, *, decompress: bool = False) -> Iterator[IO[bytes]]:
    """Opens a file, or an object at a URL; with `decompress`, one whose name ends in `.gz` as its content.

    Raises:
        ConfigError: the package for this kind of URL is not installed.
        OSError: it cannot be opened.
    """
    with ExitStack() as stack:
        if is_url(place):
            import fsspec

            try:
                file = stack.enter_context(fsspec.open(place, "rb"))
            except (ImportError, ValueError) as error:
                raise ConfigError(f"{place}: cannot be read: {error}") from error
        else:
            file = stack.enter_context(open(place, "rb"))
        if decompress and place.endswith(GZIP):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        yield file


def blocks_of_lines(file: IO[bytes]) -> list[Block]:
    """The blocks of a CSV file behind its first line, of about 1 MB; a whole one if a newline is in quotes."""
    blocks, total, in_quotes, is_whole = [], 0, False, False
    begin = offset = len(file.readline())
    while chunk := file.read(_BLOCK_BYTES):
        number = 0
        for i, text in enumerate(chunk.split(b'"')):
            # Two quotes in a row, which stand for one, end a text and begin it again.
            in_quotes ^= i > 0
            is_whole |= in_quotes and b"\n" in text
            number += 0 if in_quotes else text.count(b"\n")
        end = offset + chunk.rfind(b"\n") + 1
        if number:
            blocks.append(Block(number, begin, end))
            total, begin = total + number, end
        offset += len(chunk)
    if begin < offset:
        blocks.append(Block(1, begin, offset))
        total += 1
    return [whole(total)] if is_whole else blocks


def blocks_of_tfrecords(file: IO[bytes]) -> list[Block]:
    """The blocks of a TFRecord file, of about 1 MB; raises `UnreadableSplit` if its last record is not complete."""
    blocks, number, begin, end = [], 0, 0, 0
    while header := file.read(_HEADER):
        try:
            length = struct.unpack("<Q", header[:8])[0]
            # Its last byte shows that the record is there.
            file.seek(length + _FOOTER - 1, os.SEEK_CUR)
            is_there = bool(file.read(1))
        except (struct.error, OSError, OverflowError):
            is_there = False
        if not is_there:
            raise UnreadableSplit("its last record is not complete")
        number, end = number + 1, end + _HEADER + length + _FOOTER
        if end - begin >= _BLOCK_BYTES:
            blocks.append(Block(number, begin, end))
            number, begin = 0, end
    return [*blocks, Block(number, begin, end)] if number else blocks


def whole(num_records: int) -> Block:
    """The block of a file that can only be read from its beginning."""
    return Block(num_records, -1, -1)


def text(path: bytes, begin: np.ndarray, end: np.ndarray) -> bytes:
    """The bytes of a block."""
    with opened(path.decode()) as file:
        file.seek(int(begin))
        return file.read(int(end) - int(begin))


def tfrecords(path: bytes, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The TFRecords of a block, bytes `[n]`."""
    data, records, place = text(path, begin, end), [], 0
    while place < len(data):
        length = struct.unpack_from("<Q", data, place)[0]
        records.append(data[place + _HEADER : place + _HEADER + length])
        place += _HEADER + length + _FOOTER
    return np.array(records, object)
