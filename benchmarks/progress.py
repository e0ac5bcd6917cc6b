"""The progress of a contender: one number and its time in a memory map, which costs the contender nothing."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_RECORD = struct.Struct("qd")
#: The name of a file beside the progress: exists when a contender prepares nothing more.
PREPARED = "prepared"


class Progress:
    """Counts steps in a file of one contender's process; `read` may be called from another process.

    Args:
        path: of the file; made with a count of 0 if missing.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            # Whoever reads finds all of it or nothing.
            new = path.with_name(f".{path.name}")
            new.write_bytes(_RECORD.pack(0, 0.0))
            new.rename(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)

    def set(self, steps: int) -> None:
        """Says that `steps` steps are done, now."""
        _RECORD.pack_into(self._map, 0, steps, time.monotonic())

    def read(self) -> tuple[int, float]:
        """Steps done, and the monotonic time in seconds at which the last of them was."""
        while True:
            first, second = _RECORD.unpack_from(self._map), _RECORD.unpack_from(self._map)
            # A record that was being written reads differently twice.
            if first == second:
                return first
