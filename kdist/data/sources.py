"""The data that `fit` accepts: arrays, `tf.data.Dataset`s and dataset functions, each read by several workers.

A resumed run continues at the place in the data where it stopped. Arrays are shuffled by the seed and the number of the
pass alone, so that any place in any pass is found at once; a dataset is read up to its place in the pass.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kdist._compat.keras_data import is_made_in_batches, is_scipy_sparse
from kdist.data.base import DataContext, Readers, TrainingData, worker_dataset
from kdist.data.batch_source import BatchSource, PyDatasetShares, has_sparse_matrix
from kdist.data.columns import Hdf5Rows, WorkerArgument, arrived_shares, as_array, without_copies
from kdist.data.datasets import DatasetData, DatasetPasses, FunctionData
from kdist.data.fed_data import FedData
from kdist.data.file_column import columns_of
from kdist.data.files import FileData, Files
from kdist.data.serialization import CannotTravel, check_function, may_need_this_process
from kdist.data.split_data import SplitData, SplitSource
from kdist.errors import ConfigError

#: Of arrays, for their fingerprint.
_ROWS_TO_COMPARE = 32


class ArrayData(TrainingData):
    """Arrays, split into one shard per worker, at random if they are shuffled; each worker shuffles its own.

    Shards of every n-th example would inherit the order of the data. In MNIST, the images at even places resemble the
    first test images much more than those at odd places.
    """

    def __init__(self, arrays: Any, *, batch_size: int, shuffle: bool, seed: int | None) -> None:
        self._structure = tf.nest.map_structure(type, arrays)
        self._columns = columns_of(arrays)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        all_values = [column.values for column in self._columns]
        lengths = {len(values) for values in all_values}
        if len(lengths) != 1:
            shapes = ", ".join(str(values.shape) for values in all_values)
            raise ValueError(f"x, y and sample_weight differ in their number of examples; their shapes are {shapes}")
        self._num_examples = lengths.pop()
        if self._num_examples == 0:
            raise ValueError("x holds no example")
        self._order = np.arange(self._num_examples)
        if shuffle:
            np.random.default_rng(self._seed).shuffle(self._order)

    def fingerprint(self) -> str:
        rows = np.unique(np.linspace(0, self._num_examples - 1, _ROWS_TO_COMPARE).astype(int))
        crc = 0
        for column in self._columns:
            values = np.asarray(column.values[rows])
            crc = zlib.crc32(repr(values.tolist()).encode() if values.dtype.kind == "O" else values.tobytes(), crc)
        return f"{self._num_examples} examples, {crc:08x}"

    def batches_per_pass(self, num_workers: int) -> int:
        return self._batches_of_worker(num_workers) * self._num_parts(num_workers)

    def share_end(self, share: int, num_shares: int, num_passes: int) -> int | None:
        # With fewer examples than shares, there are none.
        return num_passes * self._batches_of_worker(num_shares) if self._num_parts(num_shares) == num_shares else None

    def specs(self, num_workers: int) -> list[tf.TensorSpec]:
        return [spec for column in self._columns for spec in column.specs(self._max_rows(num_workers))]

    def trace_transfer(self, num_workers: int) -> None:
        for column in self._columns:
            column.trace_transfer(self._max_rows(num_workers))

    def arguments(self, worker_index: int, num_workers: int) -> list[WorkerArgument]:
        # In the order of the array: a file is read from one end to the other.
        is_whole = self._num_parts(num_workers) == 1
        rows = slice(None) if is_whole else np.sort(self._order[worker_index::num_workers])
        return [column.share(rows, self._max_rows(num_workers)) for column in self._columns]

    def _num_parts(self, num_workers: int) -> int:
        """The number of shards; if it is 1, each worker's pass is a pass."""
        # With fewer examples than workers, some would get nothing: then all of them read everything.
        return num_workers if num_workers <= self._num_examples else 1

    def _max_rows(self, num_workers: int) -> int:
        """The largest number of examples that a worker gets."""
        return math.ceil(self._num_examples / self._num_parts(num_workers))

    def _batches_of_worker(self, num_workers: int) -> int:
        """Batches of each worker in a pass over its examples, the same for all."""
        return math.ceil(self._max_rows(num_workers) / self._batch_size)

    def dataset(self, context: DataContext, *arguments: tf.Tensor) -> tf.data.Dataset:
        max_rows = self._max_rows(context.num_workers)
        shares = arrived_shares(self._columns, max_rows, arguments)
        seed = tf.constant(self._seed, tf.int64) * context.num_workers + context.worker_index
        num_batches, first_batch = self._batches_of_worker(context.num_workers), tf.cast(context.first_batch, tf.int64)
        first_pass, place = first_batch // num_batches, first_batch % num_batches
        num_parts = self._num_parts(context.num_workers)
        # Some workers have no example for the last batch of a pass, which others have.
        is_short = self._num_examples % num_parts != 0 and (max_rows - 1) % self._batch_size == 0
        # Models for batches of one size need to know it.
        are_full = self._num_examples % (num_parts * self._batch_size) == 0

        def numbers_of(pass_number: tf.Tensor) -> tf.data.Dataset:
            """The numbers of the examples of each batch of a pass."""
            order = tf.range(shares[0].num_rows)
            if self._shuffle:
                # The seed determines a pass, so that a resumed run need not draw the earlier ones.
                order = tf.random.experimental.stateless_shuffle(order, tf.stack([seed, pass_number]))
            first = tf.where(pass_number == first_pass, place, 0)
            if is_short:
                return tf.data.Dataset.range(first, num_batches).map(
                    lambda batch: self._batch_of(order, batch, num_batches)
                )
            rest = tf.data.Dataset.from_tensors(order[first * self._batch_size :])
            return rest.rebatch(self._batch_size, drop_remainder=are_full)

        numbers = tf.data.Dataset.range(first_pass, tf.int64.max).flat_map(numbers_of)
        batches = numbers.map(lambda chosen: self._packed([share.take(chosen) for share in shares]))
        return without_copies(batches) if any(column.is_large(max_rows) for column in self._columns) else batches

    def _packed(self, parts: Sequence[tf.Tensor]) -> Any:
        """The parts of a batch in the structure of the arrays, in which None stands for an optional input."""
        remaining = iter(parts)
        return tf.nest.map_structure(lambda kind: None if kind is type(None) else next(remaining), self._structure)

    def _batch_of(self, order: tf.Tensor, batch: tf.Tensor, num_batches: int) -> tf.Tensor:
        """The examples of one batch of a pass, by their order in it, where some workers have none for the last one.

        Synchronous replicas need one: it takes an example of the batch before. If that has only one, both have it.
        """
        num_examples = tf.size(order, tf.int64)

        def begin(batch: tf.Tensor) -> tf.Tensor:
            return tf.maximum(tf.minimum(batch * self._batch_size, num_examples - (num_batches - batch)), 0)

        first = begin(batch)
        return order[first : tf.maximum(begin(batch + 1), first + 1)]


def training_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps_per_epoch: int | None = None,
    shuffle: bool = True,
    class_weight: Mapping[float, float] | None = None,
    seed: int | None = None,
    readers: Readers = Readers(),  # noqa: B008 - frozen
    preprocess: Callable[..., Any] | None = None,
) -> TrainingData:
    """Makes `TrainingData` of the data that was passed to `fit`.

    Args:
        x: arrays (also nested in dicts or tuples), a `tf.data.Dataset` of batches, a function
            `(DataContext) -> tf.data.Dataset` of batches, data that keeps arriving, or data that only this process can
            read, see `BatchSource`; `TrainingData` is returned as it is.
        y, sample_weight: arrays like `x`; otherwise they are part of its elements.
        batch_size: examples per replica and step, for arrays and data that keeps arriving. As in Keras, if it is None,
            arrays are read in `steps_per_epoch` steps, and without that it is 32.
        steps_per_epoch: as given to `fit`.
        shuffle: shuffles arrays in each pass.
        class_weight: class -> weight of its examples, time steps or pixels.
        seed: makes shuffling repeatable; random if None.
        readers: of the data.
        preprocess: prepares each batch, see `preprocess_batches`.

    Raises:
        ConfigError: data that these workers cannot get, or an `x` of another type.
        TaskError: the user's code failed to make its first batches.
        ValueError: arrays of different lengths, or no data.
    """
    data: TrainingData
    if isinstance(x, TrainingData):
        return x

    def size_of_batches(arrays: Any) -> int:
        return math.ceil(_num_examples(arrays) / (steps_per_epoch * readers.replicas)) if steps_per_epoch else 32

    if class_weight and (sample_weight is not None or tf.nest.is_nested(y)):
        raise ConfigError(f"class_weight: {_ONE_Y}")
    if preprocess is not None:
        x, y, sample_weight = preprocess_batches(preprocess, x, y, sample_weight, batch_size), None, None
    if isinstance(x, SplitSource):
        if y is not None or sample_weight is not None or class_weight is not None:
            raise ConfigError(
                "y, sample_weight, class_weight: with data that keeps arriving, parse returns labels and weights"
            )
        return SplitData(x, batch_size or 32)
    if not has_labels(x) and has_ragged_tensor(x, y, sample_weight):
        arrays = as_tuples((x, y, sample_weight))
        x, y, sample_weight = _batches_of(arrays, batch_size or size_of_batches(x), shuffle, seed), None, None
    if has_labels(x):
        _check_no_labels(y, sample_weight)
        data = _data_of_batches(x, batch_size, shuffle, seed, readers)
    elif has_sparse_matrix(x, y, sample_weight):
        source = BatchSource(x, y, sample_weight, batch_size=batch_size or size_of_batches(x), shuffle=shuffle)
        data = _fed(source, readers)
    else:
        _check_is_arrays(x)
        arrays = keras.utils.pack_x_y_sample_weight(*map(as_tuples, (x, y, sample_weight)))
        data = ArrayData(arrays, batch_size=batch_size or size_of_batches(x), shuffle=shuffle, seed=seed)
    if class_weight:
        data.add_weights = _weights_by_class(class_weight)
    return data


def _data_of_function(
    function: Callable[[DataContext], tf.data.Dataset], batch_size: int | None, readers: Readers
) -> TrainingData:
    """Lets the workers call a dataset function; raises `CannotTravel` if they cannot read its dataset."""
    data = FunctionData(function)
    if not readers.serve and readers.num_iterators == 1:
        return data
    try:
        make = worker_dataset(data, num_workers=readers.number, batch_size=batch_size, num_seeds=0, seed=0)
    except Exception:  # noqa: BLE001 - of the user's code: raised again when the run traces it, and reported
        return data
    check_function(make, readers.num_iterators, travels=readers.serve)
    data.is_untried = readers.serve and may_need_this_process(make)
    return data


def _batches_of(x_y_weight: tuple[Any, Any, Any], batch_size: int, shuffle: bool, seed: int | None) -> tf.data.Dataset:
    """Makes a dataset of ragged or sparse tensors, with arrays beside them."""

    def as_tensors(values: Any) -> Any:
        if values is None or isinstance(values, (tf.RaggedTensor, tf.SparseTensor)):
            return values
        (column,) = columns_of(values)
        return tf.constant(np.asarray(column.values), column.dtype)

    arrays = keras.utils.pack_x_y_sample_weight(*tf.nest.map_structure(as_tensors, x_y_weight))
    examples = tf.data.Dataset.from_tensor_slices(arrays if isinstance(arrays, tuple) else (arrays,))
    if shuffle:
        examples = examples.shuffle(len(examples), seed=seed)
    return examples.batch(batch_size)


def _data_of_batches(x: Any, batch_size: int | None, shuffle: bool, seed: int | None, readers: Readers) -> TrainingData:
    """Reads data that comes in batches; what workers cannot read is read by this process."""
    x = read_locally(x, batch_size) if readers.here else x
    if isinstance(x, Files):
        return FileData(x, batch_size or 32, shuffle=shuffle, seed=seed or 0, readers=readers)
    try:
        if is_dataset_function(x):
            return _data_of_function(x, batch_size, readers)
        if isinstance(x, tf.data.Dataset):
            return _data_of_dataset(x, readers)
    except CannotTravel:
        if readers.run_the_program:
            raise
        return FedData(BatchSource(read_locally(x, batch_size)), readers)
    if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None and readers.run_the_program:
        return PyDatasetShares(x, seed=seed or 0 if shuffle else None)
    return _fed(BatchSource(x, shuffle=shuffle, seed=seed or 0), readers)


def _data_of_dataset(x: tf.data.Dataset, readers: Readers) -> TrainingData:
    """Lets the workers read a dataset; raises `CannotTravel` if they cannot."""
    length_is_unknown = int(x.cardinality().numpy()) == tf.data.UNKNOWN_CARDINALITY
    reads_passes = readers.by_passes and length_is_unknown and not readers.run_the_program
    if readers.here or (reads_passes and readers.at_once > 1):
        return FedData(BatchSource(x), readers)
    if reads_passes:
        return DatasetPasses(x, readers.number, readers.steps_per_epoch)
    return DatasetData(x, readers.num_iterators)


def _fed(source: BatchSource, readers: Readers) -> FedData:
    if readers.run_the_program:
        raise ConfigError(
            f"x is {source.name}, which lives in one process, and with strategy=multi_worker_mirrored every worker "
            "runs the program in a process of its own; give arrays, a tf.data.Dataset, a keras.utils.PyDataset with a "
            "length or a function (context) -> tf.data.Dataset, or use parameter servers (cluster=1ps2w)"
        )
    if readers.by_passes and readers.steps_per_epoch is None and source.is_endless:
        raise ConfigError(f"{source.name} has no length and never ends; give steps (train.steps) or steps_per_epoch")
    return FedData(source, readers)


#: The data that `class_weight` is for.
_ONE_Y = "needs labels in a single y, and no sample_weight beside it; give sample_weight alone"


def _weights_by_class(class_weight: Mapping[float, float]) -> Callable[..., Any]:
    """Returns a function that adds a sample weight by class to a batch, as for Keras's `class_weight`."""
    # Labels are rounded to whole numbers: another key has no examples.
    try:
        given = {int(key): float(weight) for key, weight in class_weight.items() if int(key) == key}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"class_weight={class_weight!r}: must be a dict of class number -> weight, as {{0: 1.0, 1: 5.0}}"
        ) from error
    by_class = sorted(({0: 1.0} | given).items())
    classes = np.array([key for key, _ in by_class], np.int64)
    weights = np.array([weight for _, weight in by_class], np.float32)

    def add_weight(*batch: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if y is None or sample_weight is not None or tf.nest.is_nested(y):
            raise ValueError(f"class_weight: {_ONE_Y}")
        labels = _classes_of(y)
        flat = tf.reshape(labels, [-1])
        places = tf.minimum(tf.searchsorted(classes, flat), len(classes) - 1)
        # Classes that class_weight does not mention have weight 1.
        found = tf.where(tf.gather(classes, places) == flat, tf.gather(weights, places), 1.0)
        return x, y, tf.reshape(found, tf.shape(labels))

    return add_weight


def _classes_of(y: tf.Tensor) -> tf.Tensor:
    """The class of each label: the largest of several columns, or the nearest whole number in the only one.

    The last axis has the columns, if there is more than one axis; so each time step or pixel has a class of its own.
    """
    if y.shape.rank is None:
        raise ValueError("class_weight needs labels with a known number of axes; set their shape in the dataset")

    def nearest(labels: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, tf.int64)

    if y.shape.rank < 2:
        return nearest(y)
    if y.shape[-1] is None:
        return tf.cond(tf.shape(y)[-1] > 1, lambda: tf.argmax(y, -1), lambda: nearest(tf.squeeze(y, -1)))
    return nearest(tf.squeeze(y, -1)) if y.shape[-1] == 1 else tf.argmax(y, -1)


def _check_is_arrays(x: Any) -> None:
    """Refuses an `x` that is neither arrays nor any other data."""
    is_array = hasattr(x, "__array__") or is_scipy_sparse(x) or isinstance(x, (list, tuple, Mapping))
    if hasattr(x, "__next__") or (hasattr(x, "__iter__") and not is_array):
        raise ConfigError(
            f"x is a {type(x).__name__}; give arrays, a tf.data.Dataset, a keras.utils.PyDataset, a generator, a "
            "torch.utils.data.DataLoader, data of Grain or a function (context) -> tf.data.Dataset"
        )


def _check_no_labels(y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        raise ValueError("with data that is no array, y and sample_weight are part of its elements")


def is_dataset_function(x: Any) -> bool:
    """True if `x` is a function that makes a dataset, and not data that happens to be callable."""
    return callable(x) and not hasattr(x, "__array__") and not isinstance(x, (tf.data.Dataset, keras.utils.PyDataset))


def has_ragged_tensor(*trees: Any) -> bool:
    """True if there is a ragged or sparse tensor among arrays."""
    return any(isinstance(part, (tf.RaggedTensor, tf.SparseTensor)) for part in tf.nest.flatten(trees))


def has_labels(x: Any) -> bool:
    """True if `x` includes labels and weights, if there are any: it comes in batches, or a function makes it."""
    return isinstance(x, (tf.data.Dataset, Files)) or is_made_in_batches(x) or is_dataset_function(x)


def preprocess_batches(
    preprocess: Callable[..., Any], x: Any, y: Any = None, sample_weight: Any = None, batch_size: int | None = None
) -> Any:
    """The data as a dataset of batches, or a function of one, each prepared by `preprocess(x, y, sample_weight)`.

    Arrays stay in their order, as in the `fit` of KerasHub, and a list of strings is an array.
    """
    if is_dataset_function(x):
        return lambda context: x(context).map(preprocess)
    if isinstance(x, Files):
        _check_no_labels(y, sample_weight)
        return x.map(preprocess)
    if not isinstance(x, tf.data.Dataset):
        if has_labels(x) or isinstance(x, SplitSource):
            raise ConfigError(
                f"x is a {type(x).__name__}, and the model prepares its data itself (preprocess_samples): give arrays, "
                "a tf.data.Dataset or a function (context) -> tf.data.Dataset; or prepare the data and build the model "
                "with preprocessor=None"
            )
        arrays = keras.utils.pack_x_y_sample_weight(*map(_lists_as_arrays, (x, y, sample_weight)))
        x = tf.data.Dataset.from_tensor_slices(arrays_for_keras(arrays)).batch(batch_size or 32)
    else:
        _check_no_labels(y, sample_weight)
    return x.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)


def _lists_as_arrays(tree: Any) -> Any:
    """Lists of numbers or strings as arrays; others as tuples."""
    return keras.tree.traverse(lambda node: np.asarray(node) if isinstance(node, list) else None, as_tuples(tree))


def read_locally(x: Any, batch_size: int | None) -> Any:
    """`x` for a local Keras model: a dataset function is called for the only reader."""
    if isinstance(x, SplitSource):
        raise ConfigError(f"{type(x).__name__}: is read once, by fit; give other data to validate, evaluate or predict")
    if isinstance(x, Files):
        return x.dataset(batch_size or 32)
    return x(DataContext(tf.constant(0, tf.int64), 1, batch_size)) if is_dataset_function(x) else x


def arrays_for_keras(tree: Any) -> Any:
    """Arrays as `fit` reads them, for a local Keras model, which takes strings only as tensors; other data as it is."""
    if tree is None or has_labels(tree):
        return tree
    _check_is_arrays(tree)

    def for_keras(values: Any) -> Any:
        if values is None or isinstance(values, (tf.RaggedTensor, tf.SparseTensor)) or is_scipy_sparse(values):
            return values
        (column,) = columns_of(values)
        if column.dtype == tf.string:
            return tf.constant(column.values, tf.string)
        return column.values if isinstance(column.values, np.ndarray) else values

    return tf.nest.map_structure(for_keras, as_tuples(tree))


def _num_examples(arrays: Any) -> int:
    first = next(array for array in tf.nest.flatten(as_tuples(arrays)) if array is not None)
    has_shape = is_scipy_sparse(first) or isinstance(first, (tf.RaggedTensor, tf.SparseTensor))
    return int(first.shape[0]) if has_shape else len(as_array(first))


def split_validation(x: Any, y: Any, sample_weight: Any, validation_split: float) -> tuple[Any, Any]:
    """Splits off the last fraction of the arrays, before any shuffling, as Keras does.

    Returns `(x, y, sample_weight)` for training, and the same for validation.
    """
    if has_labels(x):
        raise ConfigError("validation_split works with arrays only; give validation_data")
    num_examples = _num_examples(x)
    split = math.floor(num_examples * (1.0 - validation_split))
    if not 0 < split < num_examples:
        raise ConfigError(f"validation_split={validation_split}: leaves nothing to train or to validate with")

    def part(chosen: slice) -> Any:
        def rows(values: Any) -> Any:
            if values is None:
                return None
            if is_scipy_sparse(values):
                return values.tocsr()[chosen]
            array = as_array(values)
            return array.run(chosen) if isinstance(array, Hdf5Rows) else array[chosen]

        return tf.nest.map_structure(rows, (x, y, sample_weight))

    return part(slice(0, split)), part(slice(split, None))


def as_tuples(tree: Any) -> Any:
    """Lists of arrays as tuples, which tf.data does not stack; a list of numbers stays a list."""
    if isinstance(tree, Mapping):
        return {key: as_tuples(item) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)) and any(hasattr(item, "__array__") or isinstance(item, dict) for item in tree):
        return tuple(as_tuples(item) for item in tree)
    return tree
