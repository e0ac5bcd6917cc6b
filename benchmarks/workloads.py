"""The workloads of all contenders: the same models, batches and initial scale, said once for all frameworks.

A model is a list of layers in plain words, so that a Keras, a TF1 and a PyTorch program can each build it their own
way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from kdist.recipes.criteo_truth import scaled_cardinalities

NUM_BATCHES = 32
NUM_CLASSES = 10
NUM_COUNTS = 13
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
class Clicks:
    """The first layers of a DLRM: a vector of each id, from a table of its own, and one of all counts; and their dot
    products.

    Its input are whole numbers: 13 counts, then an id for each table.

    Attributes:
        tables: the rows of each table.
        units: the length of a vector.
    """

    tables: tuple[int, ...]
    units: int = 16

    @property
    def num_outputs(self) -> int:
        """The vector of the counts, and a product for each pair of vectors, in both orders."""
        return self.units + (len(self.tables) + 1) ** 2


@dataclass(frozen=True)
class SimulatedCompute:
    """Passes its input on after as many seconds as it says, without using a core: work of a machine of its own.

    Whole numbers say milliseconds.
    """


Layer = Dense | Conv | Flatten | Embedding | Clicks | SimulatedCompute


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
        optimizer: `sgd`, `adam` or `adagrad`.
    """

    name: str
    title: str
    input_shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    batch_size: int
    dtype: str = "float32"
    optimizer: str = "sgd"

    @property
    def ids_per_example(self) -> int:
        """The number of ids of an example that are looked up."""
        table = self._table
        return len(table.tables) if isinstance(table, Clicks) else self.input_shape[0] if table else 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """`NUM_BATCHES` random batches: inputs `[n, batch_size, ...]`, labels int32 `[n, batch_size]`."""
        rng = np.random.default_rng(0)
        shape = (NUM_BATCHES, self.batch_size, *self.input_shape)
        match self._table:
            case Clicks(tables):
                inputs = _clicks(rng, shape, tables)
            case Embedding(rows):
                inputs = rng.integers(0, rows, shape)
            case _:
                inputs = rng.random(shape)
        if SimulatedCompute() in self.layers:
            inputs[..., 0] = CLICKS_MILLISECS if self._table else SIMULATED_SECS
        labels = rng.integers(0, NUM_CLASSES, (NUM_BATCHES, self.batch_size))
        return inputs.astype(self.dtype), labels.astype("int32")

    def num_parameters(self) -> int:
        """The number of dense parameters, which have to travel. Tables do not count."""
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
                case Clicks(_, units):
                    total += (NUM_COUNTS + 1) * units
                    shape = (layer.num_outputs,)
        return total

    @property
    def _table(self) -> Embedding | Clicks | None:
        return next((layer for layer in self.layers if isinstance(layer, (Embedding, Clicks))), None)


def _clicks(rng: np.random.Generator, shape: tuple[int, ...], tables: tuple[int, ...]) -> np.ndarray:
    """Counts and ids, as skewed as Criteo's."""
    # As those of the recipe: shares of ids fall with their rank to the power of -1.1.
    first, last = 10.0**-0.1, (np.array(tables) + 10.0) ** -0.1
    ids = (first + rng.random((*shape[:-1], len(tables))) * (last - first)) ** -10 - 10
    ids = np.minimum(ids.astype(np.int64), np.array(tables) - 1)
    counts = np.expm1(7 * rng.random((*shape[:-1], NUM_COUNTS)) ** 2).astype(np.int64)
    return np.concatenate([counts, ids], -1)


def _embedding(rows: int, name: str) -> Workload:
    layers = (Embedding(rows), Dense(NUM_CLASSES, relu=False))
    return Workload(f"embedding_{name}", f"embedding {name} x 16, 32 ids", (32,), layers, 64, "int32")


_LOGITS = Dense(NUM_CLASSES, relu=False)
CLICKS_MILLISECS = 100
# The large columns of Criteo's Kaggle data set have 50 000 to 101 313 rows.
_CLICKS = (Clicks(tuple(scaled_cardinalities(0.01))), Dense(64), Dense(32), _LOGITS)


def _criteo(name: str, title: str, layers: tuple[Layer, ...], batch_size: int) -> Workload:
    return Workload(name, title, (NUM_COUNTS + 26,), layers, batch_size, "int32", "adagrad")


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
        _criteo("criteo", "Criteo, 26 tables x 16", _CLICKS, 512),
        _criteo("criteo_sleep", "Criteo, 100 ms of simulated compute", (SimulatedCompute(), *_CLICKS), 64),
        Workload("sleep", "50 ms of simulated compute", (1,), (SimulatedCompute(), _LOGITS), 1),
    ]
}


def keras_model(workload: Workload, keras: Any, embedding: Any = None) -> Any:
    """The model in Keras 3 or in tf_keras, not compiled.

    Args:
        keras: the module.
        embedding: the class of embedding layers; that of `keras` if None.
    """
    inputs = x = keras.layers.Input(workload.input_shape, dtype=workload.dtype)
    embedding = embedding or keras.layers.Embedding
    for layer in workload.layers:
        match layer:
            case Dense(units, relu, bias):
                x = keras.layers.Dense(units, activation="relu" if relu else None, use_bias=bias)(x)
            case Conv(filters):
                x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(filters, 3, activation="relu")(x))
            case Flatten():
                x = keras.layers.Flatten()(x)
            case Embedding(rows, units):
                x = keras.layers.GlobalAveragePooling1D()(embedding(rows, units)(x))
            case Clicks(tables, units):
                logs = keras.layers.Lambda(log_counts, output_shape=(NUM_COUNTS,), dtype="float32")(x)
                vectors = [keras.layers.Dense(units, activation="relu")(logs)]
                vectors += [embedding(rows, units)(x[:, NUM_COUNTS + i]) for i, rows in enumerate(tables)]
                x = keras.layers.Lambda(dot_products, output_shape=(layer.num_outputs,))(vectors)
            case SimulatedCompute():
                x = keras.layers.Lambda(sleep, output_shape=lambda shape: shape)(x)
    return keras.Model(inputs, x)


def compiled_keras_model(workload: Workload, keras: Any, optimizer: str, embedding: Any = None) -> Any:
    """`keras_model`, with loss, accuracy and `sgd`, `adam` or `adagrad`."""
    model = keras_model(workload, keras, embedding)
    optimizers = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam, "adagrad": keras.optimizers.Adagrad}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizers[optimizer](1e-3), loss=loss, metrics=["accuracy"])
    return model


def log_counts(x: Any) -> Any:
    """The logarithms of the counts, float32 `[batch, 13]`, of inputs of `Clicks`."""
    import tensorflow as tf

    return tf.math.log1p(tf.cast(x[:, :NUM_COUNTS], tf.float32))


def dot_products(vectors: Any) -> Any:
    """The outputs of `Clicks`, of its vectors `[batch, units]`, that of the counts first."""
    import tensorflow as tf

    stacked = tf.stack(vectors, 1)
    products = tf.matmul(stacked, stacked, transpose_b=True)
    return tf.concat([vectors[0], tf.reshape(products, [-1, len(vectors) ** 2])], 1)


def dataset(workload: Workload, scale: Any = 1.0) -> Any:
    """The endless `tf.data.Dataset` of batches that every TensorFlow program reads.

    Args:
        scale: scalar; inputs that are not ids are multiplied by it.
    """
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(workload.arrays()).repeat()
    if SimulatedCompute() in workload.layers and not workload.ids_per_example:
        batches = batches.map(lambda x, labels: (x * scale, labels))
    return batches.prefetch(2)


def sleep(x: Any) -> Any:
    """`x`, after `x[0, 0]` seconds without using a core: a dataset that sleeps, read inside the step."""
    import tensorflow as tf

    microsecs = tf.cast(x[0, 0], tf.float32) * (1e3 if x.dtype.is_integer else 1e6)
    kind = {"output_types": [tf.int32], "output_shapes": [[]]}
    resting = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.Dataset.from_tensors(0)._variant_tensor,
        # It rests before each element, and once more before it says that there is no other.
        sleep_microseconds=tf.cast(microsecs / 2, tf.int64),
        **kind,
    )
    with tf.control_dependencies(tf.raw_ops.DatasetToSingleElement(dataset=resting, **kind)):
        return tf.identity(x)
