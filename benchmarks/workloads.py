"""What every contender trains: the same models, batches and initial scale, said once for all frameworks.

A model is a list of layers in plain words, so that a Keras, a TF1 and a PyTorch program can each build it their own
way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NUM_BATCHES = 32
NUM_CLASSES = 10
SIMULATED_SECS = 0.05


@dataclass(frozen=True)
class Dense:
    """`units` outputs, with bias unless it is the null model's."""

    units: int
    relu: bool = True
    bias: bool = True


@dataclass(frozen=True)
class Conv:
    """A 3 x 3 convolution without padding, ReLU, then 2 x 2 max pooling."""

    filters: int


@dataclass(frozen=True)
class Flatten:
    """All but the batch dimension as one."""


@dataclass(frozen=True)
class Embedding:
    """Looks up each id in a table of `rows` x `units` and takes the mean."""

    rows: int
    units: int = 16


@dataclass(frozen=True)
class SimulatedCompute:
    """Passes its input on after as many seconds as it says, without using a core: work of a machine of its own."""


Layer = Dense | Conv | Flatten | Embedding | SimulatedCompute


@dataclass(frozen=True)
class Workload:
    """One model with its batch.

    Attributes:
        name: in tables.
        title: what it is.
        input_shape: of one example.
        layers: the model; it ends with the logits of `NUM_CLASSES` classes.
        batch_size: examples per replica and step.
        dtype: of the inputs.
    """

    name: str
    title: str
    input_shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    batch_size: int
    dtype: str = "float32"

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`NUM_BATCHES` random batches: inputs `[n, batch_size, ...]`, labels int32 `[n, batch_size]`."""
        rng = np.random.default_rng(0)
        shape = (NUM_BATCHES, self.batch_size, *self.input_shape)
        table = next((layer for layer in self.layers if isinstance(layer, Embedding)), None)
        inputs = rng.integers(0, table.rows, shape) if table else rng.random(shape)
        if SimulatedCompute() in self.layers:
            inputs = np.full(shape, SIMULATED_SECS)
        labels = rng.integers(0, NUM_CLASSES, (NUM_BATCHES, self.batch_size))
        return inputs.astype(self.dtype), labels.astype("int32")

    def num_parameters(self) -> int:
        """How many dense parameters there are: what has to travel. Tables do not count."""
        shape, total = self.input_shape, 0
        for layer in self.layers:
            match layer:
                case Dense(units, _, bias):
                    total += (shape[-1] + bias) * units
                    shape = (*shape[:-1], units)
                case Conv(filters):
                    total += (9 * shape[-1] + 1) * filters
                    shape = ((shape[0] - 2) // 2, (shape[1] - 2) // 2, filters)
                case Flatten():
                    shape = (int(np.prod(shape)),)
                case Embedding(_, units):
                    shape = (units,)
        return total


def _embedding(rows: int, name: str) -> Workload:
    layers = (Embedding(rows), Dense(NUM_CLASSES, relu=False))
    return Workload(f"embedding_{name}", f"embedding {name} x 16, 32 ids", (32,), layers, 64, "int32")


_LOGITS = Dense(NUM_CLASSES, relu=False)
WORKLOADS = {
    workload.name: workload
    for workload in [
        Workload("null", "dispatch only", (1,), (Dense(NUM_CLASSES, relu=False, bias=False),), 1),
        Workload("mlp", "MLP 784-100-10", (784,), (Dense(100), _LOGITS), 100),
        Workload("deep", "60 x 64, 122 variables", (64,), (*[Dense(64)] * 60, _LOGITS), 32),
        Workload("cnn", "CNN 16-32", (28, 28, 1), (Conv(16), Conv(32), Flatten(), _LOGITS), 64),
        Workload("wide", "2 x 4096, 67 MB", (16,), (Dense(4096), Dense(4096), _LOGITS), 32),
        _embedding(10_000, "10k"),
        _embedding(200_000, "200k"),
        _embedding(1_000_000, "1M"),
        Workload("sleep", "50 ms of simulated compute", (1,), (SimulatedCompute(), _LOGITS), 1),
    ]
}


def keras_model(workload: Workload, keras: Any, embedding: Any = None) -> Any:
    """The model in Keras 3 or in tf_keras, not compiled.

    Args:
        keras: the module.
        embedding: the class of embedding layers; that of `keras` if None.
    """
    layers: list[Any] = [keras.layers.Input(workload.input_shape, dtype=workload.dtype)]
    for layer in workload.layers:
        match layer:
            case Dense(units, relu, bias):
                layers.append(keras.layers.Dense(units, activation="relu" if relu else None, use_bias=bias))
            case Conv(filters):
                layers += [keras.layers.Conv2D(filters, 3, activation="relu"), keras.layers.MaxPooling2D()]
            case Flatten():
                layers.append(keras.layers.Flatten())
            case Embedding(rows, units):
                layers += [(embedding or keras.layers.Embedding)(rows, units), keras.layers.GlobalAveragePooling1D()]
            case SimulatedCompute():
                layers.append(keras.layers.Lambda(sleep, output_shape=lambda shape: shape))
    return keras.Sequential(layers)


def compiled_keras_model(workload: Workload, keras: Any, optimizer: str, embedding: Any = None) -> Any:
    """`keras_model`, with loss, accuracy and `sgd` or `adam`."""
    model = keras_model(workload, keras, embedding)
    optimizers = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizers[optimizer](1e-3), loss=loss, metrics=["accuracy"])
    return model


def dataset(workload: Workload, scale: Any = 1.0) -> Any:
    """The endless `tf.data.Dataset` of batches that every TensorFlow program reads.

    Args:
        scale: scalar; inputs that are not ids are multiplied by it.
    """
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(workload.arrays()).repeat()
    if SimulatedCompute() in workload.layers:
        batches = batches.map(lambda x, labels: (x * scale, labels))
    return batches.prefetch(2)


def sleep(x: Any) -> Any:
    """`x`, after `x[0, 0]` seconds without using a core: a dataset that sleeps, read inside the step."""
    import tensorflow as tf

    kind = {"output_types": [tf.int32], "output_shapes": [[]]}
    resting = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.Dataset.from_tensors(0)._variant_tensor,
        # It rests before each element, and once more before it says that there is no other.
        sleep_microseconds=tf.cast(x[0, 0] * 1e6 / 2, tf.int64),
        **kind,
    )
    with tf.control_dependencies(tf.raw_ops.DatasetToSingleElement(dataset=resting, **kind)):
        return tf.identity(x)
