"""TensorBoard event files of a run: `tb/train` and `tb/validation`, x = global step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf


class Summaries:
    """Writers that open with their first value, so that no empty event file is left.

    Args:
        folder: the run's `tb` folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def scalars(self, split: str, values: Mapping[str, float], step: int) -> None:
        """Writes `values` by their tags to `split`, `train` or `validation`."""
        with tf.device("CPU:0"), self._writer(split).as_default(step=step):
            for tag, value in values.items():
                tf.summary.scalar(tag, value)

    def histogram(self, split: str, tag: str, values: np.ndarray, step: int) -> None:
        """Writes the distribution of `values`."""
        with tf.device("CPU:0"), self._writer(split).as_default(step=step):
            tf.summary.histogram(tag, values)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, split: str) -> tf.summary.SummaryWriter:
        if split not in self._writers:
            self._writers[split] = tf.summary.create_file_writer(str(self._folder / split))
        return self._writers[split]
