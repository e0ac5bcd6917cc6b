"""`NamedValues`: the stored values by their names in checkpoints, whichever servers and variables hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

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


class NamedValues:
    """Reads and writes all named values at once.

    Args:
        parts: the parts of each value by name, in the order of rows.
        copies: all variables that hold the same value, by name; `parts` has the first one.
    """

    def __init__(self, parts: Mapping[str, Sequence[Part]], copies: Mapping[str, Sequence[tf.Variable]]) -> None:
        self._parts = {name: list(found) for name, found in parts.items()}
        self._copies = copies
        groups: dict[tuple[str, tf.DType], dict[int, tf.Variable]] = defaultdict(dict)
        for part in chain.from_iterable(self._parts.values()):
            groups[part.variable.device, part.variable.dtype][id(part.variable)] = part.variable
        self._groups = [list(variables.values()) for variables in groups.values()]
        self._read_fused = tf.function(self._fuse_all).get_concrete_function()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each value, by name."""
        return {
            name: parts[0].shape if len(parts) == 1 else (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
            for name, parts in self._parts.items()
        }

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
            if name in self._copies:
                parts = [Part(variable, 0, parts[0].shape) for variable in self._copies[name]]
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
