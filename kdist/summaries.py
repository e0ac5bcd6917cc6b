"""TensorBoard event files of a run: `tb/train` and `tb/validation`, x = global step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class Summaries:
    """Writers that open with their first value, so that no empty event file is left.

    They are TensorBoard's own, which need no TensorFlow: an op for each value takes time from the training that it
    tells of.

    Args:
        folder: the run's `tb` folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, EventFileWriter] = {}

    def scalars(self, split: str, values: Mapping[str, float], step: int) -> None:
        """Writes `values` by their tags to `split`, `train` or `validation`."""
        for tag, value in values.items():
            self._write(split, scalar_pb(tag, np.float32(value)), step)

    def histogram(self, split: str, tag: str, values: np.ndarray, step: int) -> None:
        """Writes the distribution of `values`."""
        self._write(split, histogram_pb(tag, values), step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, split: str, summary: Summary, step: int) -> None:
        if split not in self._writers:
            self._writers[split] = EventFileWriter(str(self._folder / split))
        self._writers[split].add_event(Event(wall_time=time.time(), step=step, summary=summary))
