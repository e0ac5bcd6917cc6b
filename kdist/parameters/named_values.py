"""`NamedValues`: the stored values by their names in checkpoints, whichever servers and variables hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import prod
from typing import ClassVar

import numpy as np
import tensorflow as tf

from kdist.parameters.transport import fuse


@dataclass(frozen=True)
class Part:
    """A named value, or some rows of it, from element `start` of a variable on."""

    variable: tf.Variable
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)

    @staticmethod
    def whole(variable: tf.Variable) -> Part:
        return Part(variable, 0, tuple(variable.shape))


@dataclass(frozen=True)
class Piece:
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

    #: Values are saved, and travel, in pieces of at most this size (or one row), so that neither takes memory for a
    #: whole table.
    piece_bytes: ClassVar[int] = 64 << 20

    def __init__(self, parts: Mapping[str, Sequence[Part]], copies: Mapping[str, Sequence[tf.Variable]]) -> None:
        self._parts = {name: list(found) for name, found in parts.items()}
        self.copies = copies
        groups: dict[tuple[str, tf.DType], list[tf.Variable]] = defaultdict(list)
        for variable in self.variables:
            groups[variable.device, variable.dtype].append(variable)
        self._groups = list(groups.values())
        self._read_fused = tf.function(self._fuse_all, autograph=False)

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

    def pieces(self) -> Iterator[Piece]:
        """All values in pieces.

        Rows are cut at the same places however many servers hold them, so that what one cluster has saved in pieces
        another one reads in the same pieces.
        """
        for name, shape in self.shapes.items():
            first = 0
            for part in self._parts[name]:
                num_rows, row_size = (part.shape[0], prod(part.shape[1:])) if shape else (1, 1)
                step = max(1, self.piece_bytes // max(1, row_size * part.variable.dtype.size))
                end = first + num_rows
                for start, stop in pairwise([first, *range((first // step + 1) * step, end, step), end]):
                    yield Piece(name, shape, start, stop, part.variable, part.start + (start - first) * row_size)
                first = end

    def devices(self) -> dict[str, list[str]]:
        """The devices of the parts of each value, by name."""
        return {name: [part.variable.device for part in parts] for name, parts in self._parts.items()}

    def read(self) -> dict[str, np.ndarray]:
        """Every value, by name. Reads one tensor per server and dtype."""
        flat: dict[int, np.ndarray] = {}
        for variables, fused in zip(self._groups, self._read_fused()):
            bounds = np.cumsum([variable.shape.num_elements() for variable in variables])[:-1]
            flat |= zip(map(id, variables), np.split(fused.numpy(), bounds))

        def value(part: Part) -> np.ndarray:
            return flat[id(part.variable)][part.start : part.stop].reshape(part.shape)

        return {
            name: value(parts[0]) if len(parts) == 1 else np.concatenate([value(part) for part in parts])
            for name, parts in self._parts.items()
        }

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets values by name; the others stay unchanged."""
        written: dict[int, list[tuple[Part, np.ndarray]]] = defaultdict(list)
        for name, value in values.items():
            parts = self._parts[name]
            pieces = [np.asarray(value)]
            if name in self.copies:
                parts = [Part(variable, 0, parts[0].shape) for variable in self.copies[name]]
                pieces *= len(parts)
            elif len(parts) > 1:
                pieces = np.split(value, np.cumsum([part.shape[0] for part in parts])[:-1])
            for part, piece in zip(parts, pieces):
                written[id(part.variable)].append((part, piece))
        for pairs in written.values():
            variable = pairs[0][0].variable
            size = variable.shape.num_elements()
            if sum(part.stop - part.start for part, _ in pairs) == size:
                flat = np.empty(size, pairs[0][1].dtype)
            else:
                flat = variable.numpy().ravel()
            for part, piece in pairs:
                flat[part.start : part.stop] = piece.ravel()
            variable.assign(tf.cast(flat.reshape(variable.shape), variable.dtype))

    def _fuse_all(self) -> list[tf.Tensor]:
        fused = []
        for variables in self._groups:
            with tf.device(variables[0].device):
                fused.append(fuse([variable.read_value() for variable in variables]))
        return fused
