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
from kdist.parameters.placement.messages import fuse


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
    def num_bytes(self) -> int:
        return prod(self.own_shape) * self.variable.dtype.size

    @property
    def slice_spec(self) -> str:
        """Its place in the value, as TensorFlow's ops for checkpoints take it; empty if it is the whole value."""
        if not self.shape or (self.start, self.stop) == (0, self.shape[0]):
            return ""
        return f"{' '.join(map(str, self.shape))} {self.start},{self.stop - self.start}" + ":-" * len(self.shape[1:])

    def place_in(self, shape: tf.TensorShape) -> slice:
        """Its rows in a variable of that shape; its elements if the variable is a vector of several values."""
        row_size = prod(shape[1:])
        return slice(self.offset // row_size, (self.offset + prod(self.own_shape)) // row_size)


class NamedValues:
    """Reads and writes all named values at once.

    Args:
        shards: the shards of each value by name, in the order of rows.
        copies: all variables that hold the same value, by name; `shards` has the first one.
    """

    def __init__(
        self, shards: Mapping[str, Sequence[StoredShard]], copies: Mapping[str, Sequence[tf.Variable]]
    ) -> None:
        self._shards = {name: list(found) for name, found in shards.items()}
        self.copies = copies
        groups: dict[tuple[str, tf.DType], list[tf.Variable]] = defaultdict(list)
        for variable in self.variables:
            if not self._is_large(variable):
                groups[variable.device, variable.dtype].append(variable)
        self._groups = list(groups.values())
        self._functions: dict[tuple[str, int], tf.types.experimental.ConcreteFunction] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that hold a value, without copies."""
        variables = [shard.variable for shard in chain.from_iterable(self._shards.values())]
        return list({id(variable): variable for variable in variables}.values())

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each value, by name."""
        return {
            name: (sum(shard.shape[0] for shard in (first, *others)), *first.shape[1:]) if others else first.shape
            for name, (first, *others) in self._shards.items()
        }

    def slices(self) -> Iterator[Slice]:
        """All values in slices.

        Rows are cut at the same places however many servers hold them, so that any cluster reads the same slices as
        another one has saved.
        """
        for name, shape in self.shapes.items():
            first = 0
            for shard in self._shards[name]:
                num_rows, row_size = (shard.shape[0], prod(shard.shape[1:])) if shape else (1, 1)
                step = max(1, StoredShard.slice_bytes // max(1, row_size * shard.variable.dtype.size))
                end = first + num_rows
                for start, stop in pairwise([first, *range((first // step + 1) * step, end, step), end]):
                    yield Slice(name, shape, start, stop, shard.variable, shard.start + (start - first) * row_size)
                first = end

    def read(self) -> dict[str, np.ndarray]:
        """Every value, by name."""
        return {name: value for portion in self.portions() for name, value in portion.items()}

    def portions(self, names: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Values by name: the small ones, one tensor per server and dtype, and then each large one by itself.

        Args:
            names: of wanted values; all if None.
        """
        wanted = self._shards.keys() if names is None else names
        flat: dict[int, np.ndarray] = {}
        for variables, fused in zip(self._groups, self._fuse_all()):
            bounds = np.cumsum([variable.shape.num_elements() for variable in variables])[:-1]
            flat |= zip(map(id, variables), np.split(fused.numpy(), bounds))
        large = {n: shards for n, shards in self._shards.items() if any(id(s.variable) not in flat for s in shards)}
        yield {
            name: np.concatenate([flat[id(s.variable)][s.start : s.stop] for s in shards]).reshape(self.shapes[name])
            for name, shards in self._shards.items()
            if name not in large and name in wanted
        }
        for name, shards in large.items():
            if name not in wanted:
                continue
            value = np.empty(self.shapes[name], shards[0].variable.dtype.as_numpy_dtype)
            self._read_large(value.reshape(-1), shards)
            yield {name: value}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values by name; the others stay unchanged."""
        written: dict[int, list[tuple[StoredShard, np.ndarray]]] = defaultdict(list)
        for name, value in values.items():
            shards = self._shards[name]
            arrays = [np.asarray(value)]
            if name in self.copies:
                shards = [StoredShard(variable, 0, shards[0].shape) for variable in self.copies[name]]
                arrays *= len(shards)
            elif len(shards) > 1:
                arrays = np.split(value, np.cumsum([shard.shape[0] for shard in shards])[:-1])
            for shard, array in zip(shards, arrays):
                written[id(shard.variable)].append((shard, array))
        for pairs in written.values():
            variable = pairs[0][0].variable
            size = variable.shape.num_elements()
            if self._is_large(variable):
                for shard, array in pairs:
                    self._write_large(shard, array)
                continue
            is_all = sum(shard.stop - shard.start for shard, _ in pairs) == size
            flat = np.empty(size, pairs[0][1].dtype) if is_all else variable.numpy().ravel()
            for shard, array in pairs:
                flat[shard.start : shard.stop] = array.ravel()
            variable.assign(tf.cast(flat.reshape(variable.shape), variable.dtype))

    def write_from(self, name: str, value: tf.Tensor) -> None:
        """Sets a large value to a tensor that any task has, some rows at a time."""
        begin = 0
        for shard in self._shards[name]:
            self._write_large(shard, value, begin)
            begin += shard.stop - shard.start

    def _is_large(self, variable: tf.Variable) -> bool:
        return variable.shape.num_elements() * variable.dtype.size > StoredShard.slice_bytes

    def _read_large(self, target: np.ndarray, shards: Sequence[StoredShard]) -> None:
        """Reads shards one after the other, some rows at a time, into a vector."""
        end = 0
        for shard in shards:
            variable, row_size = shard.variable, prod(shard.variable.shape[1:])
            read = self._function("read", variable, lambda a, b, of=variable: of.read_value_no_copy()[a:b])
            for start, stop in self._spans(variable, shard.start // row_size, shard.stop // row_size):
                rows = read(tf.constant(start), tf.constant(stop)).numpy().ravel()
                target[end : end + rows.size] = rows
                end += rows.size

    def _write_large(self, shard: StoredShard, value: np.ndarray | tf.Tensor, begin: int = 0) -> None:
        """Writes a shard, some rows at a time, from element `begin` of a value on."""
        variable, row_size = shard.variable, prod(shard.variable.shape[1:])

        def assign(start: tf.Tensor, stop: tf.Tensor, rows: tf.Tensor) -> None:
            assign_rows(variable, start, stop, rows)

        write = self._function("write", variable, assign, tf.TensorSpec([None, *variable.shape[1:]], variable.dtype))
        first, source = shard.start // row_size, begin // row_size
        is_there = tf.is_tensor(value)
        # Another task cuts what it has, and sends it by way of this process: servers do not know each other.
        with tf.device(value.device if is_there else None):
            of_rows = (tf.reshape if is_there else np.reshape)(value, (-1, *variable.shape[1:]))
        for start, stop in self._spans(variable, 0, (shard.stop - shard.start) // row_size):
            with tf.device(value.device if is_there else None):
                chosen = tf.convert_to_tensor(of_rows[source + start : source + stop], variable.dtype)
            if is_there and value.device != variable.device:
                with tf.device("CPU:0"):
                    chosen = tf.identity(chosen)
            # As an argument of a function, a tensor reaches a server several times faster than by itself.
            write(tf.constant(first + start), tf.constant(first + stop), chosen)

    @staticmethod
    def _spans(variable: tf.Variable, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows `start` to `stop` of a variable, as many at a time as travel at once."""
        step = max(1, StoredShard.slice_bytes // (prod(variable.shape[1:]) * variable.dtype.size))
        return pairwise([*range(start, stop, step), stop])

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
    def _fuse_all(self) -> tf.types.experimental.ConcreteFunction:
        """Reads each group as one tensor."""

        def fuse_all() -> list[tf.Tensor]:
            fused = []
            for variables in self._groups:
                with tf.device(variables[0].device):
                    fused.append(fuse([variable.read_value() for variable in variables]))
            return fused

        return tf.function(fuse_all, autograph=False).get_concrete_function()


def assign_rows(variable: tf.Variable, start: Any, stop: Any, rows: tf.Tensor) -> tf.Operation:
    """Sets rows `start` to `stop` of a variable in place."""
    assigned = tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle, begin=[start], end=[stop], strides=[1], value=rows
    )
    with tf.control_dependencies([assigned]):
        # Otherwise every later read, and every dense update, would copy the whole variable.
        return tf.raw_ops.DisableCopyOnRead(resource=variable.handle)
