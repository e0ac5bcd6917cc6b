"""TensorBoard's files, also where they cannot be written."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from kdist.run import summaries
from kdist.run.summaries import Summaries


def tags_of(folder: Path) -> set[str]:
    """The tags in the event files of a folder, as TensorFlow reads them."""
    events = [event for path in folder.iterdir() for event in tf.compat.v1.train.summary_iterator(str(path))]
    return {value.tag for event in events for value in event.summary.value}


def test_values_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    written = Summaries(tmp_path)
    written.scalars("train", {"loss": 1.0, "accuracy": 0.5}, 3)
    written.histogram("train", "updates/staleness", np.arange(5), 3)
    assert tags_of(tmp_path / "train") == {"loss", "accuracy", "updates/staleness"}
    assert not (tmp_path / "validation").exists()
    written.close()


def test_text_and_pictures_are_what_tensorboard_shows(tmp_path: Path) -> None:
    png = tmp_path / "picture.png"
    tf.io.write_file(str(png), tf.io.encode_png(tf.zeros([5, 7, 3], tf.uint8)))
    written = Summaries(tmp_path)
    written.text("train", "config", "    a: 1", 2)
    written.picture("train", "placement/picture", png, 2)
    written.close()
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    assert set(events.Tags()["tensors"]) == {"config", "placement/picture"}
    (text,), (picture,) = events.Tensors("config"), events.Tensors("placement/picture")
    assert (text.step, text.tensor_proto.string_val[0]) == (2, b"    a: 1")
    width, height, content = picture.tensor_proto.string_val
    assert (width, height, content) == (b"7", b"5", png.read_bytes())
    plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in events.Tags()["tensors"]}
    assert plugins == {"config": "text", "placement/picture": "images"}


def test_a_disk_that_is_full_for_a_while_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Summaries(tmp_path)
    written.scalars("train", {"before": 1.0}, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patched.setattr(summaries.RecordWriter, "write", full)
        for step in (2, 3):
            written.scalars("train", {"meanwhile": 1.0}, step)
            written.scalars("validation", {"meanwhile": 1.0}, step)
    (warning,) = warned
    assert str(warning.message) == (
        f"kdist: {tmp_path}: TensorBoard's files cannot be written: No space left on device; "
        "training continues without them"
    )
    assert list((tmp_path / "validation").iterdir()) == []
    written.scalars("train", {"after": 1.0}, 4)
    written.close()
    assert tags_of(tmp_path / "train") == {"before", "after"}


def losses(folder: Path) -> list[tuple[int, float]]:
    """Steps and values as TensorBoard itself has them, with `--load_fast=false`."""
    events = plugin_event_accumulator.EventAccumulator(str(folder)).Reload()
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("loss")]


def test_values_after_the_step_that_training_goes_back_to_count_no_longer(tmp_path: Path) -> None:
    first, second = Summaries(tmp_path), Summaries(tmp_path)
    first.restart(0)
    for step in (0, 500, 1000, 1500):
        first.scalars("train", {"loss": step}, step)
    # The cluster was restarted.
    first.restart(1000)
    first.scalars("train", {"loss": 1.0}, 1100)
    # The process was killed later, and the run resumes.
    second.restart(500)
    second.scalars("train", {"loss": 2.0}, 600)
    second.close()
    assert losses(tmp_path / "train") == [(0, 0.0), (500, 500.0), (600, 2.0)]


def test_a_checkpoint_that_is_evaluated_again_has_one_point(tmp_path: Path) -> None:
    first, second = Summaries(tmp_path), Summaries(tmp_path)
    for step in (100, 200, 300, 200):
        first.evaluation({"loss": step}, step)
    second.evaluation({"loss": 5.0}, 200)
    second.close()
    assert losses(tmp_path / "evaluator") == [(100, 100.0), (200, 5.0)]
