"""The initial values of large variables, which are made without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kdist._compat.reserved import made_by
from kdist.parameters.named_values import NamedValues, assign_rows
from kdist.parameters.packing import Blocks
from kdist.parameters.placement import Shard


def fill_large(
    blocks: Blocks,
    shards: Sequence[Shard],
    variables: Sequence[keras.Variable],
    originals: Sequence[keras.Variable],
    names: Sequence[str],
    values: NamedValues,
) -> None:
    """Servers draw the rows of tables that the model has no values for; the values of others travel in pieces.

    Args:
        shards: of all blocks.
        variables: of each block.
        originals, names: the variables of the model, and their names in `values`.
    """
    to_draw: list[_Rows] = []
    to_push: dict[int, None] = {}
    for b, block in enumerate(blocks):
        for i in block.shards if blocks.is_large(b) else ():
            shard = shards[i]
            original = originals[shard.variable]
            if (initializer := made_by(original)) is None:
                to_push[shard.variable] = None
            else:
                shape, first = tuple(original.shape), blocks.first_row(i)
                to_draw.append(_Rows(variables[b].value, initializer, shape, shard.start, shard.stop, first))

    def draw(zero: tf.Tensor) -> None:
        for rows in to_draw:
            rows.draw(zero)

    if to_draw:
        tf.function(draw, autograph=False).get_concrete_function(tf.TensorSpec([], tf.uint32))(
            tf.constant(0, tf.uint32)
        )
    for index in to_push:
        # One after the other: a model that has values may be as large as this process can hold.
        values.write({names[index]: originals[index].numpy()})


@dataclass(frozen=True)
class _Rows:
    """Rows `start` to `stop` of a table.

    Attributes:
        initializer: a `kdist.layers.TableInitializer`.
        shape: of the whole table.
        first: their first row in the variable that holds them.
    """

    variable: tf.Variable
    initializer: Any
    shape: tuple[int, ...]
    start: int
    stop: int
    first: int

    def draw(self, zero: tf.Tensor) -> None:
        """Draws them on the device of the variable, block by block; traced. `zero` is an argument of the function."""
        before: list[tf.Operation] = []
        dtype = self.variable.dtype.name
        for number, (first, end) in enumerate(self.initializer.blocks(self.shape, dtype)):
            start, stop = max(first, self.start), min(end, self.stop)
            if start < stop:
                with tf.device(self.variable.device), tf.control_dependencies(before):
                    rows = self.initializer.block(number, self.shape, dtype, zero)[start - first : stop - first]
                    shift = self.first - self.start
                    before = [assign_rows(self.variable, start + shift, stop + shift, rows)]
