"""`NamedValues`: the stored values by their names in checkpoints, whichever servers and variables hold them."""

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
        name, shape: those of the whole value.
        start, stop: the rows, `stop` excluded; a scalar is one row.
        variable: what holds them.
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
        parts: the parts of each value by name, in the order of rows.
        copies: all variables that hold the same value, by name; `parts` has the first one.

    Attributes:
        copies: as given.
    """

    def __init__(self, parts: Mapping[str, Sequence[StoredShard]], copies: Mapping[str, Sequence[tf.Variable]]) -> None:
        self._parts = {name: list(found) for name, found in parts.items()}
        self.copies = copies
        self._large = [variable for variable in self.variables if self._is_large(variable)]
        groups: dict[tuple[str, tf.DType], list[tf.Variable]] = defaultdict(list)
        for variable in self.variables:
            if not self._is_large(variable):
                groups[variable.device, variable.dtype].append(variable)
        self._groups = list(groups.values())
        self._functions: dict[tuple[str, int], tf.types.experimental.ConcreteFunction] = {}

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables that hold a value, without copies."""
        return list({id(p.variable): p.variable for p in chain.from_iterable(self._parts.values())}.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each value, by name."""
        return {
            name: parts[0].shape if len(parts) == 1 else (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            for name, parts in self._parts.items()
        }

    def slices(self) -> Iterator[Slice]:
        """All values in pieces.

        Rows are cut at the same places however many servers hold them, so that what one cluster has saved in pieces
        another one reads in the same pieces.
        """
        for name, shape in self.shapes.items():
            first = 0
            for part in self._parts[name]:
                num_rows, row_size = (part.shape[0], prod(part.shape[1:])) if shape else (1, 1)
                step = max(1, StoredShard.slice_bytes // max(1, row_size * part.variable.dtype.size))
                end = first + num_rows
                for start, stop in pairwise([first, *range((first // step + 1) * step, end, step), end]):
                    yield Slice(name, shape, start, stop, part.variable, part.start + (start - first) * row_size)
                first = end

    def devices(self) -> dict[str, list[str]]:
        """The devices of the parts of each value, by name."""
        return {name: [part.variable.device for part in parts] for name, parts in self._parts.items()}

    def read(self) -> dict[str, np.ndarray]:
        """Every value, by name."""
        return {name: value for portion in self.portions() for name, value in portion.items()}

    def portions(self, names: Collection[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Values by name: the small ones, one tensor per server and dtype, and then each large one by itself.

        Args:
            names: those that are wanted; all if None.
        """
        wanted = self._parts.keys() if names is None else names
        flat: dict[int, np.ndarray] = {}
        for variables, fused in zip(self._groups, self._fuse_all()):
            bounds = np.cumsum([variable.shape.num_elements() for variable in variables])[:-1]
            flat |= zip(map(id, variables), np.split(fused.numpy(), bounds))
        large = {n: parts for n, parts in self._parts.items() if any(id(part.variable) not in flat for part in parts)}
        yield {
            name: np.concatenate([flat[id(p.variable)][p.start : p.stop] for p in parts]).reshape(self.shapes[name])
            for name, parts in self._parts.items()
            if name not in large and name in wanted
        }
        for name, parts in large.items():
            if name not in wanted:
                continue
            value = np.empty(self.shapes[name], parts[0].variable.dtype.as_numpy_dtype)
            self._read_large(value.reshape(-1), parts)
            yield {name: value}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values by name; the others stay unchanged."""
        written: dict[int, list[tuple[StoredShard, np.ndarray]]] = defaultdict(list)
        for name, value in values.items():
            parts = self._parts[name]
            pieces = [np.asarray(value)]
            if name in self.copies:
                parts = [StoredShard(variable, 0, parts[0].shape) for variable in self.copies[name]]
                pieces *= len(parts)
            elif len(parts) > 1:
                pieces = np.split(value, np.cumsum([part.shape[0] for part in parts])[:-1])
            for part, piece in zip(parts, pieces):
                written[id(part.variable)].append((part, piece))
        for pairs in written.values():
            variable = pairs[0][0].variable
            size = variable.shape.num_elements()
            if self._is_large(variable):
                for part, piece in pairs:
                    self._write_large(part, piece)
                continue
            if sum(part.stop - part.start for part, _ in pairs) == size:
                flat = np.empty(size, pairs[0][1].dtype)
            else:
                flat = variable.numpy().ravel()
            for part, piece in pairs:
                flat[part.start : part.stop] = piece.ravel()
            variable.assign(tf.cast(flat.reshape(variable.shape), variable.dtype))

    def write_from(self, name: str, value: tf.Tensor) -> None:
        """Sets a large value to a tensor that any task has, in pieces."""
        begin = 0
        for part in self._parts[name]:
            self._write_large(part, value, begin)
            begin += part.stop - part.start

    def _is_large(self, variable: tf.Variable) -> bool:
        return variable.shape.num_elements() * variable.dtype.size > StoredShard.slice_bytes

    def _read_large(self, target: np.ndarray, parts: Sequence[StoredShard]) -> None:
        """Reads parts one after the other, in pieces, into a vector."""
        end = 0
        for part in parts:
            variable, row_size = part.variable, prod(part.variable.shape[1:])
            function = self._function("read", variable, lambda a, b, of=variable: of.read_value_no_copy()[a:b])
            last, rows = part.stop // row_size, self._rows_at_once(variable)
            for start in range(part.start // row_size, last, rows):
                piece = function(tf.constant(start), tf.constant(min(last, start + rows))).numpy().ravel()
                target[end : end + piece.size] = piece
                end += piece.size

    def _write_large(self, part: StoredShard, value: np.ndarray | tf.Tensor, begin: int = 0) -> None:
        """Writes a part, in pieces, from element `begin` of a value on."""
        variable, row_size = part.variable, prod(part.variable.shape[1:])

        def assign(start: tf.Tensor, stop: tf.Tensor, rows: tf.Tensor) -> None:
            assign_rows(variable, start, stop, rows)

        function = self._function("write", variable, assign, tf.TensorSpec([None, *variable.shape[1:]], variable.dtype))
        first, rows = part.start // row_size, self._rows_at_once(variable)
        source, end = begin // row_size, (part.stop - part.start) // row_size
        is_there = tf.is_tensor(value)
        # Another task cuts what it has, and sends it by way of this process: servers do not know each other.
        with tf.device(value.device if is_there else None):
            of_rows = (tf.reshape if is_there else np.reshape)(value, (-1, *variable.shape[1:]))
        for start in range(0, end, rows):
            stop = min(end, start + rows)
            with tf.device(value.device if is_there else None):
                chosen = tf.convert_to_tensor(of_rows[source + start : source + stop], variable.dtype)
            if is_there and value.device != variable.device:
                with tf.device("CPU:0"):
                    chosen = tf.identity(chosen)
            # As an argument of a function, a tensor reaches a server several times faster than by itself.
            function(tf.constant(first + start), tf.constant(first + stop), chosen)

    def _rows_at_once(self, variable: tf.Variable) -> int:
        return max(1, StoredShard.slice_bytes // (prod(variable.shape[1:]) * variable.dtype.size))

    def _function(
        self, kind: str, variable: tf.Variable, function: Callable[..., object], *specs: tf.TensorSpec
    ) -> tf.types.experimental.ConcreteFunction:
        """A function of two rows, and what `specs` says, on the device of a variable; traced once."""
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
