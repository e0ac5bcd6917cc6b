"""TensorBoard event files of a run: `tb/train` and `tb/validation`, x = global step."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from kdist.cluster.spec import EVALUATOR
from kdist.log import warn
from kdist.model.logs import scalars

_numbers = itertools.count()
#: Those whose values come with steps.
_SPLITS = ("train", "validation")


class Summaries:
    """Writers to the run's `tb` folder that open with their first value, so that no empty event file remains.

    They do not use TensorFlow: an op for each value would slow down training. If they cannot be written (a full disk),
    that is one warning, and training continues.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _EventFile] = {}
        self._warned = False
        #: The first step from which values count, by split, as long as it is not written.
        self._unmarked: dict[str, int] = {}
        self._last_evaluated: int | None = None

    def restart(self, step: int) -> None:
        """Marks that training continues from a step: values of later steps, of an earlier attempt, no longer count.

        TensorBoard drops them when it finds a session start; otherwise their points stay, and lines go back.
        """
        for split in _SPLITS:
            self._unmarked[split] = step + 1

    def scalars(self, split: str, values: Mapping[str, Any], step: int) -> None:
        """Writes `values` by their tags to `split`, `train` or `validation`; of a list, each item."""
        self._write(split, [scalar_pb(tag, np.float32(value)) for tag, value in scalars(values)], step)

    def epoch(self, split: str, logs: Mapping[str, Any], step: int) -> None:
        """Writes loss and metrics under the names of Keras's own callback, `epoch_<name>`."""
        self.scalars(split, {f"epoch_{name}": value for name, value in logs.items()}, step)

    def evaluation(self, logs: Mapping[str, Any], step: int) -> None:
        if self._last_evaluated is None or step <= self._last_evaluated:
            self._unmarked[EVALUATOR.job] = step
        self._last_evaluated = step
        self.scalars(EVALUATOR.job, logs, step)
        self.epoch(EVALUATOR.job, logs, step)

    def histogram(self, split: str, tag: str, values: np.ndarray, step: int) -> None:
        self._write(split, [histogram_pb(tag, values)], step)

    def buckets(self, split: str, tag: str, buckets: np.ndarray, step: int) -> None:
        """Writes a distribution that was counted: float64 `[n, 3]`, lower end, upper end and number of each bucket."""
        metadata = histogram_metadata.create_summary_metadata(display_name=None, description=None)
        self._write(split, [_summary(tag, metadata, buckets.astype(np.float64))], step)

    def text(self, split: str, tag: str, text: str, step: int) -> None:
        self._write(split, [text_pb(tag, text)], step)

    def picture(self, split: str, tag: str, png: Path, step: int) -> None:
        content = png.read_bytes()
        # The header of a PNG begins with its width and height, in pixels.
        size = [str(number).encode() for number in struct.unpack(">II", content[16:24])]
        metadata = image_metadata.create_summary_metadata(display_name=None, description=None)
        self._write(split, [_summary(tag, metadata, [*size, content])], step)

    def hparams(
        self,
        name: str,
        hparams: Mapping[str, bool | int | float | str],
        metrics: Mapping[str, float],
        *,
        began: float,
        ok: bool,
    ) -> None:
        """Writes a row of the HParams tab, to `hparams`; rows of the same name are one.

        It has the chosen values by key, the final metrics by tag, and the start, in seconds since the epoch.
        """
        self.scalars("hparams", metrics, 0)
        status = Status.STATUS_SUCCESS if ok else Status.STATUS_FAILURE
        end = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=time.time()))
        # TensorBoard's own function for it creates TensorFlow's message type.
        metadata = hparams_metadata.create_summary_metadata(end)
        ended = _summary(hparams_metadata.SESSION_END_INFO_TAG, metadata, hparams_metadata.NULL_TENSOR)
        self._write("hparams", [hparams_pb(dict(hparams), trial_id=name, start_time_secs=began), ended], 0)

    def keras_graph(self, model_json: str, step: int) -> None:
        """Writes the layers of a Keras model, given as `keras.Model.to_json`, for the Graphs tab."""
        plugin = SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
        self._write("train", [_summary("keras", SummaryMetadata(plugin_data=plugin), model_json)], step)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, split: str, summaries: Sequence[Summary], step: int) -> None:
        if not summaries:
            return
        try:
            if split not in self._files:
                self._files[split] = _EventFile(self._folder / split)
            if split in self._unmarked:
                start = SessionLog(status=SessionLog.START)
                self._files[split].write(Event(wall_time=time.time(), step=self._unmarked[split], session_log=start))
                del self._unmarked[split]
            together = Summary(value=[value for each in summaries for value in each.value])
            self._files[split].write(Event(wall_time=time.time(), step=step, summary=together))
        except OSError as error:
            # A file that ends in half a record cannot be continued; the next values go to a new one.
            if split in self._files:
                self._files.pop(split).close()
            if not self._warned:
                self._warned = True
                why = error.strerror or error
                warn(f"{self._folder}: TensorBoard's files cannot be written: {why}; training continues without them")


def _summary(tag: str, metadata: SummaryMetadata, content: Any) -> Summary:
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))])


class _EventFile:
    """One event file, named as by TensorBoard's own writer. Events are flushed at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Readers sort the files by their names.
        place = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):04}"
        path = folder / f"events.out.tfevents.{place}"
        self._file = path.open("wb")
        self._records = RecordWriter(self._file)
        try:
            self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        except OSError:
            self.close()
            path.unlink()
            raise

    def write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        # It retries what could not be written before, which was reported.
        with suppress(OSError):
            self._file.close()
