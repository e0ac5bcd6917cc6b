"""Messages between tasks: one fused tensor per server and dtype, and of tables only rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from kdist._compat.tensorflow import not_compiled
from kdist.model.lookup_rounds import RowSource

K = TypeVar("K", bound=Hashable)


def fuse(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors of one dtype, flattened and concatenated."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unfuse(fused: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Undoes `fuse`."""
    parts = tf.split(fused, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]


#: Of the number of a row in fused tables, so many bits are its number in its own; those above are that of its table.
_ROW_BITS = 40


def fuse_rows(tables: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Rows of several tables, of one dtype and row shape, as those of one table; row numbers become int64."""
    if len(tables) == 1:
        return tables[0]
    numbers = [tf.cast(table.indices, tf.int64) + (i << _ROW_BITS) for i, table in enumerate(tables)]
    return tf.IndexedSlices(tf.concat([table.values for table in tables], 0), tf.concat(numbers, 0))


def unfuse_rows(fused: tf.IndexedSlices, dtypes: Sequence[tf.DType]) -> list[tf.IndexedSlices]:
    """Undoes `fuse_rows`, in any number and order of rows; `dtypes` are those of the row numbers of each table."""
    if len(dtypes) == 1:
        return [fused]
    # A wrong id may be negative: it stays in its table, whose optimizer knows what to do with it.
    tables = (fused.indices + (1 << (_ROW_BITS - 1))) // (1 << _ROW_BITS)
    partitions, numbers = tf.cast(tables, tf.int32), fused.indices - tables * (1 << _ROW_BITS)
    of_each = (tf.dynamic_partition(data, partitions, len(dtypes)) for data in (fused.values, numbers))
    return [tf.IndexedSlices(rows, tf.cast(i, dtype)) for rows, i, dtype in zip(*of_each, dtypes)]


@dataclass(frozen=True)
class Wire:
    """The format in transit: larger floating-point tensors are rounded to `dtype`, to nearest; None rounds nothing."""

    dtype: tf.DType | None = None

    #: The most that is fused, before it is rounded; TensorFlow's limit for a tensor is 2 GiB.
    max_bytes: ClassVar[int] = 512 << 20

    def pack(self, tensor: tf.Tensor) -> tf.Tensor:
        if self.dtype is None or not tensor.dtype.is_floating or tensor.dtype.size <= self.dtype.size:
            return tensor
        return tf.cast(tensor, self.dtype)

    @staticmethod
    def unpack(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The tensor as it was, when it has arrived."""
        return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


@dataclass(frozen=True)
class Layout:
    """The places of tensors in the one that they travel as.

    Rows of tables come first: how many there are of each, then their indices, both as the bits of int64 numbers, then
    their values. Then come dense tensors, flattened, one behind the other.

    Attributes:
        device: they come from it, or go to it.
        row_shapes: the shape of a row where some rows travel, by their keys.
        shapes: the shapes of dense tensors, by their keys.
        dtype: of values that are not packed.
    """

    device: str
    row_shapes: dict[Any, tf.TensorShape]
    shapes: dict[Any, tf.TensorShape]
    dtype: tf.DType

    def split(self, packed: tf.Tensor) -> dict[Any, tf.Tensor | tf.IndexedSlices]:
        """The tensors by their keys, on the device of the caller."""
        packed = tf.identity(packed)
        if not self.row_shapes:
            return self._split_dense(packed)
        num_tables, words = len(self.row_shapes), tf.int64.size // packed.dtype.size
        counts = _to_int64(packed[: num_tables * words])
        row_sizes = [shape.num_elements() for shape in self.row_shapes.values()]
        dense_size = sum(shape.num_elements() for shape in self.shapes.values())
        # Split at once: on a server each operation costs more than what it does with so few numbers.
        sizes = tf.concat([[num_tables * words], counts * words, counts * row_sizes, [dense_size]], 0)
        with not_compiled():
            _, *parts, dense = tf.split(packed, sizes, num=2 * num_tables + 2)
        slices = {
            key: tf.IndexedSlices(tf.reshape(Wire.unpack(rows, self.dtype), [-1, *shape]), _to_int64(indices))
            for (key, shape), indices, rows in zip(self.row_shapes.items(), parts, parts[num_tables:])
        }
        return slices | self._split_dense(dense) if self.shapes else slices

    def split_array(self, packed: np.ndarray) -> dict[Any, np.ndarray]:
        """Dense tensors of their own dtype, flat, by their keys: an operation for each would take longer."""
        ends = np.cumsum([shape.num_elements() for shape in self.shapes.values()])
        return dict(zip(self.shapes, np.split(packed, ends[:-1])))

    def _split_dense(self, packed: tf.Tensor) -> dict[Any, tf.Tensor]:
        return dict(zip(self.shapes, unfuse(Wire.unpack(packed, self.dtype), list(self.shapes.values()))))


#: Tensors that travel as one, packed, and their places in it.
Message: TypeAlias = "tuple[tf.Tensor, Layout]"


def cut(items: Sequence[K], num_bytes: Callable[[K], int], max_bytes: int | None = None) -> list[list[K]]:
    """Items in groups that are not larger, by default than what travels at once; a larger item is one by itself."""
    groups, left = list[list[K]](), 0
    for item in items:
        if not groups or num_bytes(item) > left:
            groups.append([])
            left = max_bytes or Wire.max_bytes
        groups[-1].append(item)
        left -= num_bytes(item)
    return groups


def _size(tensor: Any) -> int:
    """The bytes of a tensor that is fused; of some rows nobody knows how many there will be."""
    return 0 if isinstance(tensor, tf.IndexedSlices) else tensor.shape.num_elements() * tensor.dtype.size


def fuse_by(
    tensors: Mapping[K, Any],
    device_of: Callable[[K], str],
    read: Callable[[Any], tf.Tensor] = lambda tensor: tensor,
    *,
    on_source: bool = True,
    wire: Wire = Wire(),
) -> list[Message]:
    """Fuses tensors by device and dtype.

    Args:
        tensors: anything with `dtype` and a fixed `shape`, or `tf.IndexedSlices` of floating point.
        device_of: key -> the device that the tensor comes from, or goes to.
        read: makes a tensor of what is fused, if it is dense.
        on_source: whether that is where it comes from, so that it is fused there; else it is fused on the caller's.
        wire: their format in transit.
    """
    by_place: dict[tuple[str, tf.DType], list[K]] = defaultdict(list)
    for key, tensor in tensors.items():
        by_place[device_of(key), tensor.dtype].append(key)

    groups = [(*place, group) for place, keys in by_place.items() for group in cut(keys, lambda k: _size(tensors[k]))]
    messages = []
    for device, dtype, keys in groups:
        sparse = [key for key in keys if isinstance(tensors[key], tf.IndexedSlices)]
        dense = [key for key in keys if key not in sparse]
        with tf.device(device) if on_source else nullcontext():
            values = [*(tensors[key].values for key in sparse), *(read(tensors[key]) for key in dense)]
            packed = wire.pack(fuse(values))
            if sparse:
                indices = [tf.cast(tensors[key].indices, tf.int64) for key in sparse]
                whole = [tf.stack([tf.size(of_table, tf.int64) for of_table in indices]), *indices]
                packed = tf.concat([tf.reshape(tf.bitcast(tf.concat(whole, 0), packed.dtype), [-1]), packed], 0)
        row_shapes = {key: tensors[key].values.shape[1:] for key in sparse}
        messages.append((packed, Layout(device, row_shapes, {key: tensors[key].shape for key in dense}, dtype)))
    return messages


def _to_int64(words: tf.Tensor) -> tf.Tensor:
    """The int64 numbers `[n]` whose bits travelled as a vector of another dtype of at most as many bits."""
    per_word = tf.int64.size // words.dtype.size
    return tf.reshape(tf.bitcast(tf.reshape(words, [-1, per_word] if per_word > 1 else [-1]), tf.int64), [-1])


#: The result of a step for a variable: a gradient, for an embedding that of some rows; None for no change.
Change: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


@dataclass(frozen=True)
class Assigned:
    """The key of values that a step has assigned to the parameters of a block."""

    block: int


@dataclass(frozen=True)
class Overflow:
    """The key of the overflow of the gradients of a step, for a server."""

    server: int


@dataclass(frozen=True)
class Weight:
    """The key of the weight of one of several replicas, for a server: of its gradients, or of its changes of state."""

    server: int
    of_state: bool = False


UpdateKey: TypeAlias = "int | Assigned | Overflow | Weight"

#: Changes by shard, or by block, `Assigned`, `Overflow` or `Weight`; those without one are missing.
BlockUpdates: TypeAlias = "dict[Any, tf.Tensor | tf.IndexedSlices]"


@dataclass(frozen=True)
class Pulled:
    """The values that a replica step starts from.

    Attributes:
        trainable: values of the trainable variables, in the model's order; None for tables that are looked up by rows.
        state: values of the state variables (BatchNormalization statistics), in the model's order.
        global_step: scalar int64 on the first server: the number of updates in these values.
        rows: of the tables; None if there are none.
    """

    trainable: list[tf.Tensor | None]
    state: list[tf.Tensor]
    global_step: tf.Tensor
    rows: RowSource | None = None


@dataclass(frozen=True)
class Gathered:
    """Values on their servers, ready to be sent: by block in one process (`single`), fused on servers."""

    single: dict[int, tf.Tensor]
    fused: list[Message]
    global_step: tf.Tensor
