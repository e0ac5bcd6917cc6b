"""MNIST as the multi-tower programs of TF1 had it, for the recipe `mnist_towers`.

Images come from TFRecord files, each tower computes gradients on its own batch, their average is applied, moving
averages of the parameters are what is kept, and the console says examples/sec and sec/batch.

Keras and TensorFlow are imported when they are used, so that a config that names these functions can be checked without
them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kdist.recipes import mnist

from kdist.config.checks import check_whole_number
from kdist.console import lines
from kdist.errors import ConfigError
from kdist.hooks import Hook, RunContext, RunValues, SecondOrStepTimer, Session, StepCounter
from kdist.log import say

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from kdist.data.base import DataContext

_PARAMETERS = "parameters/"


def build_cnn(
    dropout: float = 0.4,
    learning_rate: float = 0.1,
    decay_steps: int = 300,
    decay_rate: float = 0.5,
    ema_momentum: float = 0.99,
) -> keras.Model:
    """The network of `mnist.build_cnn`, compiled with momentum, a decaying learning rate and moving averages.

    Input: float32 [batch, 28, 28] in 0..1.

    Args:
        learning_rate: at the first step; times `decay_rate` every `decay_steps` steps.
        ema_momentum: share of the old average in the new one. At the end the model holds the averages; what is
            validated meanwhile are the parameters themselves.
    """
    import keras

    model = mnist.build_cnn(dropout)
    schedule = keras.optimizers.schedules.ExponentialDecay(learning_rate, decay_steps, decay_rate)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, use_ema=True, ema_momentum=ema_momentum)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def load_data(
    folder: str = "data/mnist_tfrecords", num_files: int = 4, shuffle_buffer: int = 10_000, path: str | None = None
) -> dict[str, Any]:
    """MNIST as the data arguments of `fit`: x a function that reads TFRecord files, validation data in arrays.

    The files are written first, unless they are there already. Prints what the data is and where.

    Args:
        folder: for the files; made if need be.
        num_files: that the training images are dealt out to.
        shuffle_buffer: images among which the next one is drawn.
        path: an npz file with the images; see `kdist.recipes.mnist.load_data`.

    Raises:
        ConfigError: the files cannot be written to `folder`, or `path` cannot be read.
    """
    check_whole_number("data.num_files", num_files)
    check_whole_number("data.shuffle_buffer", shuffle_buffer)
    arrays = mnist.load_data(path)
    images, labels = np.rint(arrays["x"] * 255.0).astype(np.uint8), arrays["y"]
    try:
        paths, num_written = write_tfrecords(images, labels, Path(folder), num_files)
    except OSError as error:
        raise ConfigError(f"data.folder={folder}: the files cannot be written there: {error}") from None
    say(f"data      {num_files} TFRecord files in {folder}, {num_written} of them written now")
    return {"x": tfrecord_reader(paths, shuffle_buffer), "validation_data": arrays["validation_data"]}


def write_tfrecords(images: np.ndarray, labels: np.ndarray, folder: Path, num_files: int) -> tuple[list[Path], int]:
    """Writes those of the files that are missing.

    A file appears under its name when it is complete, and its name tells what is in it, so that neither half a file
    nor one of other images is ever read.

    Args:
        images: uint8 [n, 28, 28].
        labels: whole numbers [n].

    Returns:
        All the files, and how many of them were written.
    """
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"train-{digest}-{i:05}-of-{num_files:05}.tfrecord" for i in range(num_files)]
    missing = [i for i, path in enumerate(paths) if not path.exists()]
    for i in missing:
        _write_whole(paths[i], images[i::num_files], labels[i::num_files])
    return paths, len(missing)


def tfrecord_reader(paths: list[Path], shuffle_buffer: int) -> Callable[[DataContext], tf.data.Dataset]:
    """A dataset function over TFRecord files; its batches are (float32 [batch, 28, 28] in 0..1, int64 [batch])."""
    # Workers may run in another folder.
    names = [str(path.absolute()) for path in paths]

    def read(context: DataContext) -> tf.data.Dataset:
        import tensorflow as tf

        files = tf.data.Dataset.from_tensor_slices(names)
        records = files.interleave(tf.data.TFRecordDataset, cycle_length=len(names))
        # Shuffled only after it is shared out, so that no two workers read the same image.
        records = records.shard(context.num_workers, context.worker_index).shuffle(shuffle_buffer)
        # A batch parsed at once costs far less than its records one by one.
        return records.batch(context.batch_size, drop_remainder=True).map(_parse)

    return read


class WeightHistograms(Hook):
    """Writes the distribution of every parameter's values to TensorBoard, as `weights/<variable>`.

    Args:
        every_steps: steps between two histograms; at least 1.
    """

    def __init__(self, every_steps: int = 100) -> None:
        self._timer = SecondOrStepTimer(every_steps=every_steps, owner="hooks.weight_histograms")

    def after_create_session(self, session: Session) -> None:
        self._timer.start(session.global_step)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if not self._timer.due(values.global_step):
            return
        session = context.session
        for name, value in session.read().items():
            if name.startswith(_PARAMETERS):
                tag = f"weights/{name.removeprefix(_PARAMETERS)}"
                session.summaries.histogram("train", tag, value, values.global_step)
        self._timer.restart(values.global_step)

    def due_in(self, step: int) -> int | None:
        return self._timer.due_in(step)

    def idle_in(self, step: int) -> int | None:
        # The values of that very step.
        return self.due_in(step)


class PrintSpeed(StepCounter):
    """Prints examples/sec over all towers and sec/batch, the seconds of a step; tracing does not count.

    Args:
        every_steps: steps between two lines; at least 1.
    """

    def report(self, session: Session, steps_per_sec: float, examples_per_sec: float) -> None:
        columns = (f"{examples_per_sec:.1f} examples/sec", f"{1 / steps_per_sec:.3f} sec/batch")
        session.print_line(lines.event_line("speed", session.global_step, session.last_step, *columns))


def _write_whole(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    import tensorflow as tf

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        with tf.io.TFRecordWriter(str(unfinished)) as writer:
            for image, label in zip(images, labels):
                writer.write(_example(image, int(label)).SerializeToString())
        unfinished.replace(path)


def _example(image: np.ndarray, label: int) -> tf.train.Example:
    import tensorflow as tf

    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))


def _parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Serialized examples, string [batch], as images in 0..1 and labels."""
    import tensorflow as tf

    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    examples = tf.io.parse_example(records, features)
    images = tf.reshape(tf.io.decode_raw(examples["image"], tf.uint8), [-1, 28, 28])
    return tf.cast(images, tf.float32) / 255.0, examples["label"]
