"""`NamedValues`: the stored values by their names in checkpoints, from any servers and variables that hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from kdist.parameters.placement.blocks import StoredShard
from kdist.parameters.placement.messages import Layout, fuse_by


@dataclass(frozen=True)
class Slice:
    """Rows `start` to `stop` of a named value, all in one variable.

    Attributes:
        name, shape: of the whole value.
        start, stop: the rows, `stop` excluded; a scalar is one row.
        variable: holds them.
        offset: their first element in the variable.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    variable: tf.Variable
    offset: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    @property
    def slice_spec(self) -> str:
        """Its place in the value, as TensorFlow's ops for checkpoints take it; empty if it is the whole value."""
        if not self.shape or (self.start, self.stop) == (0, self.shape[0]):
            return ""
        return spec_of_rows(self.shape, self.start, self.stop - self.start)

    def place_in(self, shape: tf.TensorShape) -> slice:
        """Its rows in a variable of that shape; its elements if the variable is a vector of several values."""
        row_size = prod(shape[1:])
        return slice(self.offset // row_size, (self.offset + prod(self.own_shape)) // row_size)


def spec_of_rows(shape: Sequence[int], start: int, count: int) -> str:
    """Some rows of a tensor as TensorFlow's ops for checkpoints take them."""
    return f"{' '.join(map(str, shape))} {start},{count}" + ":-" * len(shape[1:])


class NamedValues:
    """Reads and writes all named values at once.

    Args:
        shards: the shards of each value by name, in the order of rows.
        copies: of each other value all variables that hold it, by name.
        are_remote: whether other tasks hold the variables.
    """

    def __init__(
        self,
        shards: Mapping[str, Sequence[StoredShard]],
        copies: Mapping[str, Sequence[tf.Variable]],
        *,
        are_remote: bool = False,
    ) -> None:
        self._shards = {**shards, **{name: [StoredShard.whole(first)] for name, (first, *_) in copies.items()}}
        self.copies = copies
        self._are_remote = are_remote
        self._small = {id(variable): variable for variable in self.variables if not self._is_large(variable)}
        self._layouts: list[Layout] = []
        self._functions: dict[tuple[str, int], tf.types.experimental.ConcreteFunction] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that hold a value, without copies."""
        variables = [shard.variable for shard in chain.from_iterable(self._shards.values())]
        return list({id(variable): variable for variable in variables}.values())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: (sum(shard.shape[0] for shard in (first, *others)), *first.shape[1:]) if others else first.shape
            for name, (first, *others) in self._shards.items()
        }

    def slices(self) -> Iterator[Slice]:
        return chain.from_iterable(map(self._slices_of, self._shards))

    def _slices_of(self, name: str) -> Iterator[Slice]:
        """A value in slices.

        Rows are cut at the same places however many servers hold them, so that any cluster reads the same slices as
        another one has saved.
        """
        first, shape = 0, self.shapes[name]
        for shard in self._shards[name]:
            num_rows, row_size = (shard.shape[0], prod(shard.shape[1:])) if shape else (1, 1)
            step = max(1, StoredShard.slice_bytes // max(1, row_size * shard.variable.dtype.size))
            end = first + num_rows
            for start, stop in pairwise([first, *range((first // step + 1) * step, end, step), end]):
                yield Slice(name, shape, start, stop, shard.variable, shard.start + (start - first) * row_size)
            first = end

    def read(self) -> dict[str, np.ndarray]:
        return {name: value for portion in self.portions() for name, value in portion.items()}

    def portions(self, names: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Values by name: all small ones, and then each large one by itself.

        Args:
            names: of wanted values; all if None.
        """
        wanted = self._shards.keys() if names is None else names
        flat = self._read_small()
        large = [name for name, shards in self._shards.items() if any(id(s.variable) not in flat for s in shards)]
        yield {
            name: np.concatenate([flat[id(s.variable)][s.start : s.stop] for s in shards]).reshape(self.shapes[name])
            for name, shards in self._shards.items()
            if name not in large and name in wanted
        }
        for name in large:
            if name in wanted:
                yield {name: self._read_large(name)}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values by name; the others stay unchanged."""
        written: dict[int, list[tuple[Slice, np.ndarray]]] = defaultdict(list)
        for name, value in values.items():
            whole = np.reshape(value, self.shapes[name])
            if name in self.copies:
                for variable in self.copies[name]:
                    variable.assign(tf.cast(whole, variable.dtype))
                continue
            for each in self._slices_of(name):
                written[id(each.variable)].append((each, np.atleast_1d(whole)[each.start : each.stop]))
        for parts in written.values():
            variable = parts[0][0].variable
            if self._is_large(variable):
                for each, rows in parts:
                    self._write_large(each, tf.convert_to_tensor(rows, variable.dtype))
                continue
            size = variable.shape.num_elements()
            is_all = sum(rows.size for _, rows in parts) == size
            flat = np.empty(size, parts[0][1].dtype) if is_all else variable.numpy().ravel()
            for each, rows in parts:
                flat[each.offset : each.offset + rows.size] = rows.ravel()
            variable.assign(tf.cast(flat.reshape(variable.shape), variable.dtype))

    def write_from(self, name: str, value: tf.Tensor) -> None:
        """Sets a large value to a tensor that any task has, some rows at a time."""
        for each in self._slices_of(name):
            # Another task cuts what it has, and sends it by way of this process: servers do not know each other.
            with tf.device(value.device):
                rows = value[each.start : each.stop] if each.shape else value
            if value.device != each.variable.device:
                with tf.device("CPU:0"):
                    rows = tf.identity(rows)
            self._write_large(each, rows)

    def _is_large(self, variable: tf.Variable) -> bool:
        return variable.shape.num_elements() * variable.dtype.size > StoredShard.slice_bytes

    def _read_small(self) -> dict[int, np.ndarray]:
        """Small variables, flat, by their `id`; from a server comes one tensor per dtype."""
        if not self._are_remote:
            return {key: variable.numpy().ravel() for key, variable in self._small.items()}
        flat: dict[int, np.ndarray] = {}
        for fused, layout in zip(self._fuse_small(), self._layouts):
            flat |= layout.split_array(fused.numpy())
        return flat

    def _read_large(self, name: str) -> np.ndarray:
        value = np.empty(self.shapes[name], self._shards[name][0].variable.dtype.as_numpy_dtype)
        for each in self._slices_of(name):
            variable, place = each.variable, each.place_in(each.variable.shape)
            read = self._function("read", variable, lambda a, b, of=variable: of.read_value_no_copy()[a:b])
            rows = read(tf.constant(place.start), tf.constant(place.stop))
            np.atleast_1d(value)[each.start : each.stop] = rows.numpy().reshape(each.own_shape)
        return value

    def _write_large(self, each: Slice, rows: tf.Tensor) -> None:
        variable, place = each.variable, each.place_in(each.variable.shape)

        def assign(start: tf.Tensor, stop: tf.Tensor, rows: tf.Tensor) -> None:
            assign_rows(variable, start, stop, tf.reshape(rows, [-1, *variable.shape[1:]]))

        # As an argument of a function, a tensor reaches a server several times faster than by itself.
        write = self._function("write", variable, assign, tf.TensorSpec(None, variable.dtype))
        write(tf.constant(place.start), tf.constant(place.stop), rows)

    def _function(
        self, kind: str, variable: tf.Variable, function: Callable[..., object], *specs: tf.TensorSpec
    ) -> tf.types.experimental.ConcreteFunction:
        """A function of two rows and more arguments, on the device of a variable; traced once."""
        key = kind, id(variable)
        if key not in self._functions:

            def there(*arguments: tf.Tensor) -> object:
                with tf.device(variable.device):
                    return function(*arguments)

            row = tf.TensorSpec([], tf.int32)
            self._functions[key] = tf.function(there, autograph=False).get_concrete_function(row, row, *specs)
        return self._functions[key]

    @cached_property
    def _fuse_small(self) -> tf.types.experimental.ConcreteFunction:
        """Reads small variables as few tensors."""

        def fuse_small() -> list[tf.Tensor]:
            fused = fuse_by(self._small, lambda key: self._small[key].device, lambda variable: variable.read_value())
            self._layouts = [layout for _, layout in fused]
            return [tensor for tensor, _ in fused]

        return tf.function(fuse_small, autograph=False).get_concrete_function()


def assign_rows(variable: tf.Variable, start: Any, stop: Any, rows: tf.Tensor) -> tf.Operation:
    """Sets rows `start` to `stop` of a variable in place."""
    assigned = tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=[start], end=[stop], strides=[1], value=rows
    )
    return _then_read_without_copies(variable, assigned)


def assign_elements(variable: tf.Variable, places: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    """Sets elements of a vector in place, each to one of `values`."""
    assigned = tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=places, updates=values)
    return _then_read_without_copies(variable, assigned)


def _then_read_without_copies(variable: tf.Variable, assigned: tf.Operation) -> tf.Operation:
    with tf.control_dependencies([assigned]):
        # Otherwise every later read, and every dense update, would copy the whole variable.
        return tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


def write_whole(prefix: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes whole tensors from this process."""
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=list(map(tf.constant, tensors.values())),
        )
